"""Put a rank's part of a full tensor into its parameter, from memory or from a file, without communication."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from windlass.trainer.stored import StoredTensor


def fill(target: Tensor, value: Tensor) -> None:
    """Copy this rank's slice of a full tensor into a parameter."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            value = value.to(device=target.to_local().device)
            part = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(value)


def own_rows(target: Tensor) -> tuple[int, int, Tensor]:
    """Which rows of the full tensor this rank holds, and the plain tensor they are in."""
    if not isinstance(target, DTensor):
        return 0, target.shape[0], target
    mesh, local = target.device_mesh, target.to_local()
    share = -(-target.shape[0] // mesh["shard"].size())
    first = min(target.shape[0], mesh.get_local_rank("shard") * share)
    last = min(target.shape[0], first + share)
    if local.shape[0] != last - first:
        raise RuntimeError(f"a slice of {local.shape[0]} rows where [{first}, {last}) was expected")
    return first, last, local


@torch.no_grad()
def fill_from(target: Tensor, stored: StoredTensor) -> None:
    """Read this rank's rows of a stored tensor. Rows that the file lacks become the mean of those it has."""
    if not target.ndim:
        target.copy_(stored.whole())
        return
    first, last, local = own_rows(target)
    there = stored.shape[0]
    for row, part in stored.chunks(first, min(last, there)):
        local[row - first : row - first + part.shape[0]].copy_(part)
    if last > there and last > first:
        local[max(there, first) - first :].copy_(mean_row(stored))


def mean_row(stored: StoredTensor) -> Tensor:
    """The mean of all rows: where a row for a new token begins."""
    total = torch.zeros(stored.shape[1:], dtype=torch.float64)
    for _, part in stored.chunks(0, stored.shape[0]):
        total += part.to(torch.float64).sum(0)
    return (total / stored.shape[0]).to(torch.float32)
