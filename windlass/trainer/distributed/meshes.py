"""The ranks as grids: which of them hold copies, shards and parts of a model, and which share sequences and experts.

Every grid has the ranks in their order: those of a tensor group are next to each other, on one node where they fit.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.plan.layout import Layout
from windlass.spec import Run
from windlass.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meshes:
    """Each is made where it is asked for first; all ranks ask in the same order."""

    run: Run
    layout: Layout
    ranks: Ranks

    @functools.cached_property
    def model(self) -> DeviceMesh:
        """What FSDP2 spreads parameters over, and within each of its shards the ranks of a tensor group."""
        shards, tensor = self.layout.shards, self.layout.tensor
        if self.layout.sharding == "hybrid":
            log.info("hybrid sharding: %d copies, each over %d ranks", self.layout.copies, shards * tensor)
        return self._grid(shard=shards, tensor=tensor)

    @functools.cached_property
    def shards(self) -> DeviceMesh:
        return outer(self.model, "tensor")

    @functools.cached_property
    def tensor(self) -> DeviceMesh:
        return self.model["tensor"]

    @functools.cached_property
    def tokens(self) -> DeviceMesh:
        """For parts of a model that every rank computes for tokens of its own, those of a tensor group too."""
        return self._grid(shard=self.layout.shards * self.layout.tensor)

    @functools.cached_property
    def experts(self) -> DeviceMesh:
        expert = self.layout.expert
        return self._grid(shard=self.layout.shards * self.layout.tensor // expert, expert=expert)

    @functools.cached_property
    def context(self) -> DeviceMesh:
        """Ranks that hold parts of the same sequences."""
        tensor, context = self.layout.tensor, self.layout.context
        grid = self._made({"data": self.ranks.data_ranks, "context": context, "tensor": tensor})
        return grid["context"]

    def _grid(self, *, shard: int, **inner: int) -> DeviceMesh:
        sizes = {"replicate": self.layout.copies} if self.layout.sharding == "hybrid" else {}
        return self._made(sizes | {"shard": shard} | {name: size for name, size in inner.items() if size > 1})

    def _made(self, sizes: dict[str, int]) -> DeviceMesh:
        """A collective of any of its groups ends after parallel.timeout_minutes: torch would give them its default."""
        made = init_device_mesh(self.ranks.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        # its public name since torch 2.14
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for dimension in sizes:
            set_timeout(timedelta(minutes=self.run.parallel.timeout_minutes), made.get_group(dimension))
        return made


def outer(mesh: DeviceMesh, inner: str) -> DeviceMesh:
    """A grid without its innermost dimension, which is called so where there is one."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != inner)
    return mesh[names] if len(names) < mesh.ndim else mesh
