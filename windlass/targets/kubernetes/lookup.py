"""Find runs in a cluster by what the cluster keeps of them: from any machine, without a run folder."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from windlass.errors import UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.spec import Run
from windlass.spec.loading import parse_run
from windlass.targets.kubernetes.api.discovery import served
from windlass.targets.kubernetes.api.errors import RefusedError
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind, ServedKind
from windlass.targets.kubernetes.manifests.labels import LOOP_LABEL, MANAGED_BY, NAME_ANNOTATION
from windlass.targets.kubernetes.manifests.render import layout_of
from windlass.targets.kubernetes.submission import RUN_KEY

OURS = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())


@dataclass(frozen=True)
class ClusterRun:
    """A run that is in the cluster."""

    name: str
    kind: JobKind
    served: ServedKind
    value: Object


def runs(api: Api) -> Iterator[ClusterRun]:
    """The runs in the namespace: one question for each kind of job that the cluster serves."""
    namespace = api.access.namespace
    for kind, part in served(api, schemas=False).kinds.items():
        path = object_path(part.api_version, part.plural, namespace)
        try:
            values = list(api.items(path, labelSelector=f"{OURS},!{LOOP_LABEL}"))
        except RefusedError as error:
            if error.code == 403 and kind is not JobKind.INDEXED:  # an operator's kind that is not for this user
                continue
            raise
        for value in values:
            metadata = value["metadata"]
            if any(owner.get("controller") for owner in metadata.get("ownerReferences") or ()):
                continue  # a part of a run's job, not the job itself: a TrainJob has Jobs of its own
            name = (metadata.get("annotations") or {}).get(NAME_ANNOTATION) or metadata["name"]
            yield ClusterRun(name, kind, part, {**value, "kind": part.kind})


def adopt(api: Api, name: str) -> RunFolder:
    """A run folder on this machine for a run of the cluster; every verb works with it from then on."""
    listed = list(runs(api))
    submitted = next((job for job in listed if job.name == name), None)
    if submitted is None:
        names = [job.name for job in listed]
        near = difflib.get_close_matches(name, names, 1)
        where = f"the namespace {api.access.namespace} of the context {api.access.context}"
        raise UserError(
            f"there is no run {name!r} in {where}",
            evidence=f"runs there: {', '.join(names) or 'none'}",
            fix=f"windlass show {near[0]} --on kubernetes:{api.access.context}"
            if near
            else f"windlass ls --on kubernetes:{api.access.context}",
        )
    run = run_of(api, submitted)
    folder = RunFolder(runs_root() / name)
    folder.create(run)
    layout = layout_of(submitted.kind, run)
    job = ClusterJob.of_object(
        api.access, submitted.kind, submitted.served, submitted.value, layout, submission="", adopted=True
    )
    job.write(folder)
    return folder


def run_of(api: Api, submitted: ClusterRun) -> Run:
    """The resolved run file, which travels with the job."""
    name = f"{submitted.value['metadata']['name']}-run"
    value = api.find(object_path("v1", "configmaps", api.access.namespace, name))
    text = ((value or {}).get("data") or {}).get(RUN_KEY)
    if text is None:
        raise UserError(
            f"the run file of {submitted.name} is not in the cluster any more",
            evidence=f"no {RUN_KEY} in the ConfigMap {name}",
        )
    return parse_run(yaml.safe_load(text), source=f"the ConfigMap {name}")
