"""Golden manifests: every preset as every kind of job. `python -m tests.kubernetes.golden` writes them anew.

A file holds one preset's objects for all kinds, on the cluster that such a model is trained on. The resolved run file
is left out of its ConfigMap: it is the spec's business, and it changes with every new key.
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from windlass.catalog.instances import instance as instance_of
from windlass.catalog.models import presets
from windlass.plan import resolve
from windlass.spec import parse_run
from windlass.targets.kubernetes.manifests.cluster_facts import ClusterFacts, JobKind, NodeFacts, Served, ServedKind
from windlass.targets.kubernetes.manifests.code import Carried
from windlass.targets.kubernetes.manifests.labels import DIGEST_ANNOTATION, VERSION_ANNOTATION
from windlass.targets.kubernetes.manifests.render import render, settle
from windlass.targets.kubernetes.manifests.resources import INSTANCE_LABEL

GOLDEN = Path(__file__).parent / "golden"
LAYER = "topology.k8s.aws/network-node-layer-3"
KINDS = {
    JobKind.TRAINJOB: ServedKind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs"),
    JobKind.PYTORCHJOB: ServedKind("kubeflow.org/v1", "PyTorchJob", "pytorchjobs"),
    JobKind.HYPERPOD: ServedKind("sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob", "hyperpodpytorchjobs"),
    JobKind.INDEXED: ServedKind("batch/v1", "Job", "jobs"),
}
SERVED = Served(KINDS, kubernetes=(1, 36))
CPU_NODES = [NodeFacts(f"node{i}", allocatable={"cpu": "16", "memory": "64Gi"}) for i in range(3)]
# Nodes and instance type of each preset; and one option that no other preset's files show.
CLUSTERS = {
    "llama2-7b": (2, "p4d.24xlarge", {"same_zone": False}),
    "llama2-13b": (2, "p4de.24xlarge", {"priority_class": "high"}),
    "llama2-70b": (16, "p5.48xlarge", {"queue": "research", "queue_priority": "high", "preferred_topology": LAYER}),
    "llama3.1-8b": (2, "p5.48xlarge", {"secrets": ["HF_TOKEN", "WANDB_API_KEY=secret:wandb/key"]}),
    "llama3.1-70b": (16, "p5en.48xlarge", {"deadline": "7d", "keep_for": "1d", "required_topology": LAYER}),
    "llama3.1-405b": (64, "p6-b200.48xlarge", {"min_nodes": 48}),
    "llama3.2-1b": (1, "g6e.12xlarge", {"environment": {"HF_HOME": "/windlass/runs/hub"}}),
    "llama3.2-3b": (4, "g5.48xlarge", {"spread": "none", "shm": "64Gi"}),
    "mistral-7b": (2, "p5.48xlarge", {"service_account": "trainer", "image_pull_secrets": ["registry"]}),
    "mistral-7b-v0.1": (4, "g6.48xlarge", {"storage": "hostpath:/fsx/runs"}),
    "mathstral-7b": (2, "g7e.48xlarge", {"node_selector": {"team": "maths"}, "tolerations": [{"key": "maths"}]}),
    "mixtral-8x7b": (8, "p6-b300.48xlarge", {"max_pod_failures": 100}),
    "llama-tiny": (3, None, {}),
    "llama3.2-tiny": (1, None, {"storage": "none"}),
    "mistral-tiny": (3, None, {"min_nodes": 2}),
    "mixtral-tiny": (
        3,
        None,
        {
            "labels": {"team": "a"},
            "annotations": {"b": "c"},
            "node_lost_seconds": 5,
            "pod": {"containers": [{"name": "trainer", "workingDir": "/tmp"}]},
        },
    ),
}


def run_of(preset, kind, **more):
    nodes, instance, options = CLUSTERS.get(preset, (3, None, {}))
    resources = {"nodes": nodes, "instance": instance}
    if instance is None:
        resources = {"nodes": nodes, "processes_per_node": 2, "gpus_per_node": 0, "threads_per_process": 4}
    options = {"job": str(kind), "storage": "pvc:fsx/me", **options, **more}
    return parse_run(
        {
            "name": preset,
            "model": {"preset": preset},
            "data": {"source": "corpus:austen"},
            "resources": resources,
            "image": {"name": "registry.example/windlass:1"},
            "target": {"kind": "kubernetes", "kubernetes": options},
        }
    )


def cluster_of(preset, served=SERVED):
    nodes, instance, _ = CLUSTERS.get(preset, (3, None, {}))
    if instance is None:
        return ClusterFacts(served, "team", CPU_NODES)
    gpus = {"nvidia.com/gpu": str(instance_of(instance).gpus), "hugepages-2Mi": "5128Mi"}
    named = [NodeFacts(f"node{i}", {INSTANCE_LABEL: f"ml.{instance}"}, gpus) for i in range(nodes)]
    return ClusterFacts(served, "team", named)


@cache
def rendered(preset, kind):
    return request_of(preset, kind)


def request_of(preset, kind, served=SERVED, **more):
    cluster = cluster_of(preset, served)
    run = resolve(settle(run_of(preset, kind, **more), cluster))
    values = {"HF_TOKEN": "hf_golden"} if "HF_TOKEN" in run.target.kubernetes.secrets else {}
    return render(run, cluster, Carried({}, values, token="golden-token"), submission="0a1b2c3d")


def text_of(preset) -> str:
    parts, seen = [], []
    for kind in JobKind:
        objects = [_shown(manifest) for manifest in rendered(preset, kind).objects]
        objects = [
            manifest for manifest in objects if manifest not in seen
        ]  # ConfigMaps and the like are the same everywhere
        seen += objects
        parts.append(f"# {kind}\n{yaml.dump_all(objects, Dumper=_Compact, sort_keys=False, width=118)}")
    return "---\n".join(parts)


def _shown(handler):
    about = {**handler["metadata"], "annotations": {**handler["metadata"]["annotations"]}}
    for changing in (DIGEST_ANNOTATION, VERSION_ANNOTATION):
        about["annotations"].pop(changing, None)
    if handler["kind"] == "ConfigMap":
        return {**handler, "metadata": about, "data": {"run.yaml": "…"}}
    return {**handler, "metadata": about}


class _Compact(yaml.SafeDumper):
    """Small things on one line."""

    def ignore_aliases(self, data):
        return not (isinstance(data, dict) and "spec" in data)  # a master's and a worker's pod are the same

    def represent_mapping(self, tag, mapping, flow_style=None):
        small = len(str(mapping)) < 100 and not any(
            isinstance(item, dict) and len(item) > 2 for item in mapping.values()
        )
        return super().represent_mapping(tag, mapping, flow_style=small)

    def represent_sequence(self, tag, sequence, flow_style=None):
        plain = all(isinstance(item, str | int) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=plain)


def files() -> Iterator[tuple[Path, str]]:
    for preset in presets():
        yield GOLDEN / f"{preset}.yaml", text_of(preset)


def main() -> int:
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.yaml"):
        old.unlink()
    for path, text in files():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
