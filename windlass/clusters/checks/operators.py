"""The operators that make pods of jobs: whether their kinds are served in a version we know, and somebody answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from windlass.clusters.needs import Needs
from windlass.clusters.result import Result, failed, passed, skipped, warning
from windlass.clusters.snapshot import Refusal, Snapshot, name_of
from windlass.targets.kubernetes.manifests.cluster_facts import GROUPS, PLURALS, JobKind

# The versions that manifests are written for (targets/kubernetes/manifests/schemas).
KNOWN_VERSIONS: Mapping[JobKind, str] = {
    JobKind.TRAINJOB: "v1alpha1",
    JobKind.PYTORCHJOB: "v1",
    JobKind.HYPERPOD: "v1",
}
# Part of the name that each operator's Deployment has, in its own manifests and Helm chart.
CONTROLLERS: Mapping[JobKind, str] = {
    JobKind.TRAINJOB: "kubeflow-trainer",
    JobKind.PYTORCHJOB: "training-operator",
    JobKind.HYPERPOD: "hp-training-controller",
}
INSTALL: Mapping[JobKind, str] = {
    JobKind.TRAINJOB: "helm install kubeflow-trainer oci://ghcr.io/kubeflow/charts/kubeflow-trainer "
    "--namespace kubeflow-system --create-namespace",
    JobKind.PYTORCHJOB: "kubectl apply --server-side -k "
    "'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3'",
    JobKind.HYPERPOD: "aws eks create-addon --cluster-name CLUSTER "
    "--addon-name amazon-sagemaker-hyperpod-training-operator",
}


def job_operators(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    wanted = [needs.kind] if needs.kind else list(KNOWN_VERSIONS)
    # kubeflow.org is also the group of notebooks and MPI jobs
    served = [kind for kind in wanted if kind in KNOWN_VERSIONS and kind in snapshot.kinds]
    served = [kind for kind in served if snapshot.served_versions(GROUPS[kind])]
    for kind in served:
        yield from _version(snapshot, kind)
        yield from _controller(snapshot, kind)
    if needs.kind is JobKind.INDEXED or (not served and needs.kind is None):
        yield passed("plain Jobs are served; no training operator is needed for them")
    elif needs.kind and not served:
        yield failed(
            f"the cluster does not serve {needs.kind} jobs",
            evidence=f"the API group {GROUPS[needs.kind]} is not in /apis",
            fix=f"{INSTALL[needs.kind]}    or target.kubernetes.job=job",
        )


def _version(snapshot: Snapshot, kind: JobKind) -> Iterator[Result]:
    # other kinds of the group may be served in versions that this one is not
    version, known = snapshot.kinds[kind], KNOWN_VERSIONS[kind]
    versions = [version] if version else snapshot.served_versions(GROUPS[kind])
    if known in versions:
        yield passed(f"{kind}: {GROUPS[kind]}/{known} is served")
    else:
        yield failed(
            f"{kind}: the cluster serves another version than windlass writes",
            evidence=f"{PLURALS[kind]}.{GROUPS[kind]}: {', '.join(versions)} is served, {known} is needed",
            fix=f"{INSTALL[kind]}    or target.kubernetes.job=job",
        )


def _controller(snapshot: Snapshot, kind: JobKind) -> Iterator[Result]:
    if isinstance(snapshot.deployments, Refusal):
        yield skipped(f"{kind}: its controller was not looked at", str(snapshot.deployments))
        return
    controllers = [deployment for deployment in snapshot.deployments if CONTROLLERS[kind] in name_of(deployment)]
    if not controllers:
        yield warning(
            f"{kind}: no controller was found that makes pods of such jobs",
            evidence=f"no Deployment with {CONTROLLERS[kind]!r} in its name",
            fix=INSTALL[kind],
        )
        return
    ready = [controller for controller in controllers if (controller.get("status") or {}).get("readyReplicas")]
    controller = (ready or controllers)[0]  # one that is ready is enough: another may be an old one, scaled to none
    namespace, name = controller["metadata"]["namespace"], name_of(controller)
    if ready:
        yield passed(f"{kind}: {namespace}/{name} is ready")
    else:
        yield failed(
            f"{kind}: the controller {namespace}/{name} is not ready, so no pods are made of such jobs",
            evidence=f"0 of {(controller.get('spec') or {}).get('replicas', 1)} replicas are ready",
            fix=f"kubectl -n {namespace} describe deployment {name}",
        )
