"""GPU and EFA devices: the plugins that offer them to pods, and the driver below them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windlass.catalog.instances import instances
from windlass.clusters.needs import EFA, GPU, Needs
from windlass.clusters.result import Result, failed, passed, skipped, warning
from windlass.clusters.snapshot import Refusal, Snapshot
from windlass.targets.kubernetes.api.http import Object
from windlass.targets.kubernetes.manifests.capacity import NodeRoom
from windlass.targets.kubernetes.manifests.resources import INSTANCE_LABEL

DRIVER = "nvidia.com/cuda.driver-version.full"
DRIVER_PARTS = ("nvidia.com/cuda.driver.major", "nvidia.com/cuda.driver.minor", "nvidia.com/cuda.driver.rev")
# The oldest driver of each CUDA major version: within one, minor versions are compatible.
# docs.nvidia.com/deploy/cuda-compatibility, 2026-08
MINIMUM_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
CUDA_IN_IMAGE = re.compile(r"cu(?:da)?[-_]?(\d{2})[.\d]")
# Names of the plugins' DaemonSets: NVIDIA's own and the GPU operator's, GKE's; AWS' chart and eksctl's.
GPU_PLUGINS, EFA_PLUGINS = ("nvidia-device-plugin", "nvidia-gpu-device-plugin"), ("efa-k8s-device-plugin",)
# AMD's own manifest (github.com/ROCm/k8s-device-plugin) and its chart; NVIDIA's plugin for shared RDMA, and SR-IOV's.
AMD_PLUGINS = ("amdgpu-device-plugin", "amd-gpu-device-plugin")
RDMA_PLUGINS = ("rdma-shared-dp", "sriov-device-plugin", "sriov-network-device-plugin")
DIVIDED = ("nvidia.com/mig-", "nvidia.com/gpu.shared")  # GPUs offered in parts, under other names
GPU_INSTALL = (
    "helm install nvdp nvidia-device-plugin --repo https://nvidia.github.io/k8s-device-plugin "
    "--namespace nvidia-device-plugin --create-namespace"
)
AMD_INSTALL = "kubectl create -f https://raw.githubusercontent.com/ROCm/k8s-device-plugin/master/k8s-ds-amdgpu-dp.yaml"
RDMA_INSTALL = "https://github.com/Mellanox/k8s-rdma-shared-dev-plugin    or an SR-IOV device plugin that offers it"
EFA_INSTALL = (
    "helm install aws-efa-k8s-device-plugin aws-efa-k8s-device-plugin "
    "--repo https://aws.github.io/eks-charts --namespace kube-system"
)


def gpu_plugin(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    """NVIDIA's, whole or divided; AMD's where the run asks for that."""
    amd, mig = needs.asked("amd.com/"), needs.asked(*DIVIDED)
    for resource in amd:
        yield from _plugin(snapshot, needs, resource, AMD_PLUGINS, None, AMD_INSTALL)
    for resource in mig:
        yield from _plugin(snapshot, needs, resource, GPU_PLUGINS, None, GPU_INSTALL)
    if not amd and not mig:
        yield from _plugin(snapshot, needs, GPU, GPU_PLUGINS, "gpus", GPU_INSTALL)


def rdma_plugin(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    for resource in needs.asked("rdma/"):
        yield from _plugin(snapshot, needs, resource, RDMA_PLUGINS, None, RDMA_INSTALL)


def efa_plugin(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    yield from _plugin(snapshot, needs, EFA, EFA_PLUGINS, "efa", EFA_INSTALL)


def driver(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    """The nodes' driver against the CUDA that the image's name tells."""
    asked = needs.asked("nvidia.com/")
    if needs.pod is None or not asked:
        return
    offering = [room for room in snapshot.rooms.values() if any(room.allocatable.get(key) for key in asked)]
    rooms = [room for room in offering if room.usable_by(needs.pod)]
    if not rooms:
        return
    match = CUDA_IN_IMAGE.search(needs.image or "")
    drivers = {room.name: version for room in rooms if (version := driver_version(room.labels))}
    if match is None or not drivers:
        missing = "the image's name does not tell its CUDA" if match is None else f"no node has the label {DRIVER}"
        yield skipped("the driver was not compared with the image's CUDA", missing)
        return
    cuda = int(match[1])
    minimum = MINIMUM_DRIVER.get(cuda)
    if minimum is None:
        yield skipped(f"no minimum driver is known for CUDA {cuda}", needs.image)
        return
    oldest = min(drivers, key=lambda name: drivers[name])
    have, want = (".".join(map(str, version)) for version in (drivers[oldest], minimum))
    if drivers[oldest] < minimum:
        yield failed(
            f"CUDA {cuda} needs driver {want}, and nodes have {have}",
            evidence=f"{oldest}: {have}; image {needs.image}",
            fix=f"an image with CUDA {cuda - 1}, or a newer node image (AMI)",
        )
    else:
        yield passed(f"driver {have} or newer runs CUDA {cuda}")


def driver_version(labels: Mapping[str, str]) -> tuple[int, ...] | None:
    """The driver's version, by the labels that GPU feature discovery puts on a node."""
    text = labels.get(DRIVER) or ".".join(filter(None, (labels.get(part) for part in DRIVER_PARTS)))
    return tuple(int(part) for part in text.split(".")) if re.fullmatch(r"\d+(\.\d+)*", text) else None


def _plugin(
    snapshot: Snapshot, needs: Needs, resource: str, names: Sequence[str], column: str | None, install: str
) -> Iterator[Result]:
    rooms = list(snapshot.rooms.values())
    whole = [room for room in rooms if not any(key.startswith(DIVIDED) for key in room.allocatable)]
    should_have = {room.name: amount for room in whole if column and (amount := _by_catalogue(room, column))}
    offering = [room for room in rooms if room.allocatable.get(resource)]
    if not should_have and not offering and not needs.asks(resource):
        return
    if isinstance(snapshot.daemonsets, Refusal):
        yield skipped("its DaemonSet was not looked at", str(snapshot.daemonsets))
    else:
        plugins = [value for value in snapshot.daemonsets if any(name in value["metadata"]["name"] for name in names)]
        # of the variants that GKE has for each kind of node, most are wanted nowhere
        yield from (_rollout(plugin) for plugin in plugins if _wanted(plugin))
        if not plugins and not offering:  # a pool may be scaled to zero
            yield (failed if should_have and needs.asks(resource) else warning)(
                f"nothing offers {resource} to pods",
                evidence=f"no DaemonSet is called {' or '.join(names)}, and no node has {resource} to give",
                fix=install,
            )
    short = [room for room in rooms if room.allocatable.get(resource, 0.0) < should_have.get(room.name, 0)]
    for room in short[:3]:
        have, wanted = room.allocatable.get(resource, 0.0), should_have[room.name]
        yield (failed if not have and needs.asks(resource) else warning)(
            f"{room.name} offers {have:g} of its {wanted} {resource}",
            evidence=f"{room.labels.get(INSTANCE_LABEL)} has {wanted}; status.allocatable says {have:g}",
            fix=f"kubectl describe node {room.name}    shows the plugin's pod and what the kubelet says",
        )
    if offering and not short:
        total = sum(room.allocatable[resource] for room in offering)
        yield passed(f"{len(offering)} nodes offer {total:g} {resource}")


def _rollout(plugin: Object) -> Result:
    status, place = plugin.get("status") or {}, f"{plugin['metadata']['namespace']}/{plugin['metadata']['name']}"
    wanted, ready = _wanted(plugin), int(status.get("numberReady") or 0)
    if ready < wanted:
        return failed(
            f"{place} is ready on {ready} of {wanted} nodes",
            evidence=f"desiredNumberScheduled {wanted}, numberReady {ready}",
            fix=f"kubectl -n {plugin['metadata']['namespace']} describe daemonset {plugin['metadata']['name']}",
        )
    return passed(f"{place} is ready on {ready} of {wanted} nodes")


def _wanted(plugin: Object) -> int:
    return int((plugin.get("status") or {}).get("desiredNumberScheduled") or 0)


def _by_catalogue(room: NodeRoom, column: str) -> int:
    """How many devices the node's instance type has; 0 where the catalogue does not know the type."""
    entry: Any = instances().get(room.labels.get(INSTANCE_LABEL, "").removeprefix("ml."))
    return int(getattr(entry, column) or 0) if entry else 0
