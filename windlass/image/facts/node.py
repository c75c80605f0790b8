"""What is known of the nodes that an image is for: GPU, driver, platform, network."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.catalog.gpus import Gpu, gpu, gpu_of_device
from windlass.catalog.instances import instance
from windlass.errors import UserError
from windlass.image.facts.table import capability, gpu_name, version_of
from windlass.spec import Run


@dataclass(frozen=True)
class Node:
    """A node as far as an image has to know it. None: not known."""

    gpu: str | None = None  # the catalogue's name; None also where the run trains on CPUs
    driver: str | None = None
    platform: str = "linux/amd64"
    efa: bool = False
    cpu_only: bool = False
    origin: str = "the run file"

    @property
    def capability(self) -> str | None:
        return capability(gpu_name(self.gpu) or self.gpu) if self.gpu else None

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
    named = gpu_named(gpu_name) if gpu_name else kind.gpu if kind else None
    cpu_only = run.image.cuda == "cpu" or (run.resources.gpus_per_node == 0 and not gpu_name)
    machine = f"linux/{kind.arch}" if kind else "linux/amd64"
    if kind and run.image.platform and run.image.platform != machine:
        raise UserError(
            f"image.platform is {run.image.platform} but a {kind.type} is {machine}",
            fix=f"image.platform={machine}",
        )
    return Node(
        gpu=None if cpu_only or named is None else named.name,
        driver=None if cpu_only else driver,
        platform=run.image.platform or machine,
        efa=run.image.efa if run.image.efa is not None else bool(kind and kind.efa),
        cpu_only=cpu_only,
        origin=f"resources.instance={kind.type}" if kind else "the run file",
    )


def gpu_named(name: str) -> Gpu:
    """A GPU by a catalogue name, by a family such as A100, or by what a node's label calls it."""
    device = gpu_of_device(name)
    if device:
        return device
    return gpu("A100-80GB" if name.strip().lower() == "a100" else name)


def node_named(
    gpu_text: str | None, driver: str | None, platform: str = "linux/amd64", *, efa: bool = False
) -> Node:
    """A node by what a user types; without a GPU it has none."""
    return Node(
        gpu=(gpu_name(gpu_text) or gpu_text) if gpu_text else None,
        driver=driver,
        platform=platform,
        efa=efa,
        cpu_only=gpu_text is None,
        origin="the command line",
    )
