"""A run as a plain indexed Job: what every cluster serves. Pure."""

from __future__ import annotations

from typing import Any

from windlass.errors import UserError
from windlass.spec import Run
from windlass.spec.kubernetes import seconds
from windlass.targets.kubernetes.facts import Served
from windlass.targets.kubernetes.request import Manifest

SUCCESS_POLICY_SINCE = (1, 31)


def job_spec(run: Run, template: Manifest, served: Served) -> dict[str, Any]:
    """The spec of a batch/v1 Job, alone or inside a JobSet.

    There is no podFailurePolicy: with one, Kubernetes replaces a pod only once it has ended, and a pod on a lost node
    never ends. Without one it is replaced as soon as it is given up. A run that failed for good remembers it, so its
    replacements leave at once until the limit is reached.
    """
    asked, num_nodes = run.target.kubernetes, run.resources.nodes
    limit = asked.max_pod_failures
    return {
        "completions": num_nodes,
        "parallelism": num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": run.target.max_restarts * num_nodes if limit is None else limit,
        "podReplacementPolicy": "TerminatingOrFailed",
        **_success(run, served),
        "template": template,
    }


def _success(run: Run, served: Served) -> dict[str, Any]:
    """With fewer nodes than pods a run may end while some pod has not started: node 0 speaks for all."""
    if not is_elastic(run):
        return {}
    if served.kubernetes < SUCCESS_POLICY_SINCE:
        version = ".".join(map(str, served.kubernetes))
        raise UserError(
            f"target.kubernetes.min_nodes needs Kubernetes 1.31 for this kind of job, the cluster has {version}",
            fix="leave target.kubernetes.min_nodes out, or target.kubernetes.job=pytorchjob",
        )
    return {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}


def is_elastic(run: Run) -> bool:
    least = run.target.kubernetes.min_nodes
    return least is not None and least < run.resources.nodes


def limits(run: Run) -> dict[str, int]:
    """When a job is ended, and when its remains are deleted."""
    asked = run.target.kubernetes
    found = {}
    if asked.deadline:
        found["activeDeadlineSeconds"] = seconds(asked.deadline)
    if asked.keep_for:
        found["ttlSecondsAfterFinished"] = seconds(asked.keep_for)
    return found


def indexed_job(run: Run, metadata: Manifest, template: Manifest, served: Served) -> list[Manifest]:
    spec = {**job_spec(run, template, served), **limits(run)}
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]
