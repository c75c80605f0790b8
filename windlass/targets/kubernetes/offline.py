"""Render for Kubernetes without a cluster: the run file and the packaged schemas are all there is."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from windlass.spec import Run, dump_run
from windlass.targets.kubernetes.client import Gathered, KubernetesTarget
from windlass.targets.kubernetes.manifests import render
from windlass.targets.kubernetes.manifests.cluster_facts import PLURALS, ClusterFacts, JobKind, Served, ServedKind
from windlass.targets.kubernetes.manifests.code import Carried, gather
from windlass.targets.kubernetes.manifests.request import KubernetesRequest, with_options
from windlass.targets.kubernetes.manifests.secrets import own_names
from windlass.targets.kubernetes.manifests.validation import schema_of, validate, versions_of

# The newest of each kind that windlass has a schema of.
KINDS = {
    JobKind.TRAINJOB: ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    JobKind.PYTORCHJOB: ("kubeflow.org/v1", "PyTorchJob"),
    JobKind.HYPERPOD: ("sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob"),
    JobKind.INDEXED: ("batch/v1", "Job"),
}


class OfflineKubernetes(KubernetesTarget):
    """Any cluster that serves what the run file asks for. The same run file gives the same bytes, for Git and CI."""

    def settle(self, run: Run) -> Run:
        return render.settle(run, self.facts(run))

    def gather(self, run: Run) -> Gathered:
        submission = hashlib.sha256(dump_run(run).encode()).hexdigest()[:8]
        return Gathered(self.facts(run), _carried(run), submission)

    def check(self, run: Run, request: KubernetesRequest, *, bytes_needed: int | None) -> list[str]:
        validate(request.objects)
        assumed = [f"{what} is assumed: no cluster was asked" for what in self._assumed(run, request)]
        return [*request.warnings, *assumed, "claims, secrets, quotas, free GPUs and permissions were not checked"]

    def facts(self, run: Run) -> ClusterFacts:
        options = run.target.kubernetes
        served = Served({kind: _newest(kind) for kind in JobKind})
        return ClusterFacts(served, namespace=options.namespace or "default", context=options.context)

    def _assumed(self, run: Run, request: KubernetesRequest) -> list[str]:
        options = run.target.kubernetes
        assumed = [] if options.namespace else ["namespace default (target.kubernetes.namespace)"]
        if not options.job:
            assumed.append(f"{KINDS[request.kind][1]} (target.kubernetes.job)")
        return assumed


def _carried(run: Run) -> Carried:
    """Code goes along; values of secrets are neither shown nor needed, so that they need not be on this machine."""
    carried = gather(with_options(run, secrets=()), {})
    return replace(carried, secret_values=dict.fromkeys(own_names(run), "not read offline"))


def _newest(kind: JobKind) -> ServedKind:
    api_version, name = KINDS[kind]
    return ServedKind(api_version, name, PLURALS[kind], schema_of(versions_of(name)[-1], name))
