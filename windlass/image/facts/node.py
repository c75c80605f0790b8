"""What is known of the nodes that an image is for: GPU, driver, platform, network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from windlass.catalog.gpus import gpu, gpu_of_device, gpus
from windlass.catalog.instances import instance, instances
from windlass.errors import UserError
from windlass.image.facts.table import capability, facts, gpu_in_table, host_platform, unknown_to_driver, version_of
from windlass.spec import Run

GPU = "nvidia.com/gpu.product"
DRIVER = "nvidia.com/cuda.driver-version.full"
DRIVER_PARTS = ("nvidia.com/cuda.driver.major", "nvidia.com/cuda.driver.minor", "nvidia.com/cuda.driver.rev")
ARCHITECTURE = "kubernetes.io/arch"
INSTANCE = "node.kubernetes.io/instance-type"
DEFAULT_PLATFORM = "linux/amd64"
NO_GPU = ("none", "cpu")  # what --gpu calls nodes without one


@dataclass(frozen=True)
class Node:
    """A node as far as an image has to know it. None: not known."""

    gpu: str | None = None  # the catalogue's name; None also where the run trains on CPUs
    driver: str | None = None
    platform: str = DEFAULT_PLATFORM
    efa: bool = False
    cpu_only: bool = False
    origin: str = "the run file"

    @property
    def capability(self) -> str | None:
        return capability(gpu_in_table(self.gpu) or self.gpu) if self.gpu else None

    @property
    def contradiction(self) -> str | None:
        """Why there is no such node: its driver does not run its GPU."""
        reason = unknown_to_driver(self.capability, self.driver) if self.capability and self.driver else None
        return f"driver {self.driver} does not run {self.gpu}: {reason}" if reason else None

    def describe(self) -> str:
        parts = ["CPU only" if self.cpu_only else self.gpu or "GPU not known"]
        if not self.cpu_only:
            parts.append(f"driver {self.driver}" if self.driver else "driver not known")
        parts.append(self.platform)
        if self.efa:
            parts.append("EFA")
        return ", ".join(parts)


def node_of(run: Run, *, driver: str | None = None, gpu_name: str | None = None) -> Node:
    """The node that a run file describes, with what the user adds."""
    kind = instance(run.resources.instance) if run.resources.instance else None
    without_gpu = bool(gpu_name) and str(gpu_name).lower() in NO_GPU
    cpu_only = without_gpu or run.image.cuda == "cpu" or (run.resources.gpus_per_node == 0 and not gpu_name)
    named = None
    if not without_gpu:
        named = _gpu_of(gpu_name) if gpu_name else kind.gpu.name if kind and kind.gpu else None
    machine = f"linux/{kind.arch}" if kind else _platform(named, run.image.platform)
    if kind and run.image.platform and run.image.platform != machine:
        raise UserError(
            f"image.platform is {run.image.platform} but a {kind.type} is {machine}", fix=f"image.platform={machine}"
        )
    return Node(
        gpu=None if cpu_only else named,
        driver=None if cpu_only else driver,
        platform=run.image.platform or machine,
        efa=run.image.efa if run.image.efa is not None else bool(kind and kind.efa),
        cpu_only=cpu_only,
        origin=f"resources.instance={kind.type}" if kind else "the run file",
    )


def _gpu_of(text: str) -> str:
    """A GPU of the catalogue or of the table; an unknown one is an error that names them, the nearest first."""
    device = gpu_of_device(text)
    known = device.name if device else gpu_in_table(text)
    if known:
        return known
    try:
        return gpu(text).name
    except UserError as error:
        names = dict.fromkeys([*gpus(), *facts()["compute_capability"]["values"], "none"])
        raise UserError(error.what, evidence=f"GPUs: {', '.join(names)}", fix=error.fix or "--gpu h100") from None


def _platform(gpu_name: str | None, asked: str | None) -> str:
    """The platform that is asked for, else that of the GPU's hosts; an error where they differ."""
    host = host_platform(gpu_name) if gpu_name else None
    if asked and host and asked != host:
        raise UserError(
            f"the platform is to be {asked}, but every node with a {gpu_name} is {host}",
            evidence=facts()["gpu_hosts"]["source"],
            fix=f"--platform {host}    or image.platform={host}",
        )
    return asked or host or DEFAULT_PLATFORM


def node_named(gpu_text: str | None, driver: str | None, platform: str | None = None, *, efa: bool = False) -> Node:
    """A node by what a user types; without a GPU, or with `none`, it has none."""
    text = None if gpu_text is None or gpu_text.lower() in NO_GPU else gpu_text
    named = (gpu_in_table(text) or text) if text else None
    return Node(
        gpu=named,
        driver=driver,
        platform=_platform(named, platform),
        efa=efa,
        cpu_only=named is None,
        origin="the command line",
    )


def node_from_labels(nodes: Sequence[Mapping[str, str]], *, instance: str | None = None) -> Node:
    """What every GPU node of a cluster can run: the oldest driver of them; of one instance type where it is named."""
    wanted = instance.removeprefix("ml.") if instance else None
    chosen = [node for node in nodes if not wanted or node.get(INSTANCE, "").removeprefix("ml.") == wanted]
    with_gpus = [one for one in chosen if GPU in one or one.get(INSTANCE, "").removeprefix("ml.") in instances()]
    if not with_gpus:
        raise UserError(
            f"the cluster has no {instance} node" if instance else "the cluster has no node that says it has a GPU",
            evidence=f"{len(nodes)} nodes; none has the label {GPU} or an instance type of the catalogue",
            fix="--gpu h100 --driver 570.86    says it by hand",
        )
    machines = {
        f"linux/{one[ARCHITECTURE]}" if ARCHITECTURE in one else _platform(_gpu(one), None) for one in with_gpus
    }
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
