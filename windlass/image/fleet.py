"""The weakest node of a cluster, from the labels that GPU discovery puts on nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windlass.catalog.gpus import gpu_of_device
from windlass.catalog.instances import instances
from windlass.errors import UserError
from windlass.image.facts.node import Node
from windlass.image.facts.table import version_of

GPU = "nvidia.com/gpu.product"
DRIVER = "nvidia.com/cuda.driver-version.full"
DRIVER_PARTS = ("nvidia.com/cuda.driver.major", "nvidia.com/cuda.driver.minor", "nvidia.com/cuda.driver.rev")
ARCHITECTURE = "kubernetes.io/arch"
INSTANCE = "node.kubernetes.io/instance-type"


def node_from_labels(nodes: Sequence[Mapping[str, str]], *, instance: str | None = None) -> Node:
    """What every GPU node of a cluster can run: the oldest driver of them; of one instance type where it is named."""
    wanted = instance.removeprefix("ml.") if instance else None
    chosen = [one for one in nodes if not wanted or one.get(INSTANCE, "").removeprefix("ml.") == wanted]
    with_gpus = [one for one in chosen if GPU in one or one.get(INSTANCE, "").removeprefix("ml.") in instances()]
    if not with_gpus:
        raise UserError(
            f"the cluster has no {instance} node" if instance else "the cluster has no node that says it has a GPU",
            evidence=f"{len(nodes)} nodes; none has the label {GPU} or an instance type of the catalogue",
            fix="--gpu h100 --driver 570.86    says it by hand",
        )
    machines = {f"linux/{one.get(ARCHITECTURE, 'amd64')}" for one in with_gpus}
    products = sorted({name for one in with_gpus if (name := _gpu(one))})
    if len(machines) > 1 or len(products) > 1:
        raise UserError(
            "the GPU nodes of the cluster are not alike, and one image is for one kind",
            evidence=", ".join([*sorted(machines), *products]),
            fix="resources.instance=p5.48xlarge    names the kind",
        )
    drivers = sorted((found for one in with_gpus if (found := _driver(one))), key=version_of)
    kinds = [instances().get(one.get(INSTANCE, "").removeprefix("ml.")) for one in with_gpus]
    return Node(
        gpu=products[0] if products else None,
        driver=drivers[0] if drivers else None,
        platform=machines.pop(),
        efa=any(kind is not None and bool(kind.efa) for kind in kinds),
        origin=f"{len(with_gpus)} node{'s' * (len(with_gpus) > 1)} of the cluster",
    )


def _gpu(labels: Mapping[str, str]) -> str | None:
    device = gpu_of_device(labels[GPU]) if GPU in labels else None
    kind = instances().get(labels.get(INSTANCE, "").removeprefix("ml."))
    return device.name if device else kind.gpu.name if kind else None


def _driver(labels: Mapping[str, str]) -> str | None:
    if DRIVER in labels:
        return labels[DRIVER]
    parts = [labels[name] for name in DRIVER_PARTS if labels.get(name)]
    return ".".join(parts) if parts else None
