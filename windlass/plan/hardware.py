"""What a plan runs on: one kind of GPU, how many per node, and what connects them."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.catalog.gpus import Gpu
from windlass.catalog.instances import Instance

PCIE_GB_S = 32.0  # one direction of a ×16 slot, generation 4, where there is no NVLink
DEFAULT_NETWORK_GBPS = 100.0  # between nodes that are not in the catalogue


@dataclass(frozen=True)
class Hardware:
    gpu: Gpu
    gpus_per_node: int
    nodes: int
    instance: Instance | None = None

    @property
    def ranks(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def has_nvlink(self) -> bool:
        return self.gpu.nvlink_gb_s is not None and (self.instance is None or self.instance.nvlink)

    @property
    def link_gb_s(self) -> float:
        """Between GPUs of one node, per GPU, in one direction."""
        return (self.gpu.nvlink_gb_s or 0.0) / 2 if self.has_nvlink else PCIE_GB_S

    @property
    def network_gb_s(self) -> float:
        """Out of one node, in one direction."""
        known = self.instance.network_gbps if self.instance else None
        return (known or DEFAULT_NETWORK_GBPS) / 8

    def describe(self) -> str:
        where = f" ({self.instance.type})" if self.instance else ""
        return f"{self.nodes} × {self.gpus_per_node} {self.gpu.name}{where}"
