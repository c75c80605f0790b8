"""What would be sent to a cluster: objects in order, the job among them, and how its pods map to ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from windlass.spec import Run
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind

Manifest = dict[str, Any]


def with_options(run: Run, **options: Any) -> Run:
    """The run with other values in target.kubernetes."""
    kubernetes = run.target.kubernetes.model_copy(update=options)
    return run.model_copy(update={"target": run.target.model_copy(update={"kubernetes": kubernetes})})


@dataclass(frozen=True)
class PodLayout:
    """How pods of the job are found, and which ranks run in which."""

    selector: str  # label selector of the training pods
    index_labels: tuple[str, ...]  # the first that a pod has gives its index
    first_by: tuple[str, str] | None  # a label and the value of it that makes a pod node 0; the others follow
    num_pods: int
    ranks_per_pod: int
    container: str  # whose log is the ranks'

    def node_of(self, labels: Mapping[str, str]) -> int | None:
        """The node rank of a pod, by its labels; None where it has none (yet)."""
        if self.first_by and labels.get(self.first_by[0]) == self.first_by[1]:
            return 0
        for label in self.index_labels:
            if labels.get(label, "").isdigit():
                return int(labels[label]) + (1 if self.first_by else 0)
        return None

    def ranks_of(self, node: int) -> range:
        """Ranks of a node while all pods are there; with fewer (elastic) the pods' own records say it."""
        return range(node * self.ranks_per_pod, (node + 1) * self.ranks_per_pod)

    def node_of_rank(self, rank: int) -> int:
        return rank // self.ranks_per_pod


@dataclass(frozen=True)
class KubernetesRequest:
    """Objects to create, in this order. Values of secrets are apart from them and are never printed."""

    name: str  # the run's
    object_name: str  # safe_name(name)
    namespace: str
    context: str | None
    kind: JobKind
    objects: tuple[Manifest, ...]  # the job comes last; what is before it shall be owned by it
    pods: PodLayout
    digest: str
    submission: str
    template: Manifest = field(default_factory=dict, repr=False)  # of the job's pods
    warnings: tuple[str, ...] = ()
    secret_values: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def job(self) -> Manifest:
        """The object whose status is the job's."""
        return self.objects[-1]

    @property
    def dependents(self) -> Sequence[Manifest]:
        """What goes with the job: created before it, owned by it once it is there, and gone when it is deleted."""
        return self.objects[:-1]

    @property
    def example_pod(self) -> Manifest:
        """A pod as the job makes them, to be checked alone; operators add labels and variables to theirs."""
        about = {"name": f"{self.object_name}-0", "namespace": self.namespace, **self.template["metadata"]}
        spec = {"restartPolicy": "Never", **self.template["spec"]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}

    def with_secret_values(self, manifest: Manifest) -> Manifest:
        """A manifest as it is sent: a Secret of ours gets its values, everything else is what was printed."""
        if manifest["kind"] != "Secret" or not self.secret_values:
            return manifest
        return {**manifest, "stringData": dict(self.secret_values)}

    def __str__(self) -> str:
        where = f"--namespace {self.namespace}" + (f" --context {self.context}" if self.context else "")
        note = f"# kubectl {where} create -f - < the following"
        if self.secret_values:
            note += f"\n# the Secret's values are sent and not shown: {', '.join(sorted(self.secret_values))}"
        return f"{note}\n{as_yaml(self.objects)}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": "kubernetes",
            "context": self.context,
            "namespace": self.namespace,
            "kind": str(self.kind),
            "digest": self.digest,
            "secrets": sorted(self.secret_values),
            "objects": [dict(value) for value in self.objects],
        }


def as_yaml(objects: Sequence[Manifest]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and no anchors where two containers share a list."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
