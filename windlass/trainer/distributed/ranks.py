"""Who this process is among the ranks, and how ranks agree with each other."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from windlass.catalog.gpus import Gpu, gpu_of_device
from windlass.common.ports import free_port
from windlass.errors import UserError
from windlass.spec import Run

SHARE_GPUS = "WINDLASS_SHARE_GPUS"  # for tests: ranks share the GPUs that there are; `windlass run` refuses it


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    host: dist.ProcessGroup  # gloo, for what the CPU has to know; never waits for the GPU
    saving: dist.ProcessGroup  # gloo, used by the thread that writes checkpoints alone
    patient: dist.ProcessGroup | None = None  # gloo, without a limit: for ranks that wait for another's long work
    tensor: int = 1  # ranks, one after the other, that compute the same tokens together
    context: int = 1  # such groups, one after the other, that compute parts of the same sequences

    @property
    def gpu(self) -> Gpu | None:
        """What the catalogue knows of this rank's GPU; None on CPUs, and for GPUs that are not in it."""
        return gpu_of_device(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None

    @property
    def data_rank(self) -> int:
        """Which share of every global batch this rank works on, with the others of its tensor and context group."""
        return self.rank // (self.tensor * self.context)

    @property
    def data_ranks(self) -> int:
        """Into how many shares a global batch is divided."""
        return self.world_size // (self.tensor * self.context)

    @property
    def context_rank(self) -> int:
        """Which part of every sequence this rank works on."""
        return self.rank // self.tensor % self.context

    @property
    def loss_ranks(self) -> int:
        """Of how many ranks the losses and the gradients add up to the whole: a tensor group's are the same."""
        return self.world_size // self.tensor

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """The element-wise sum over all ranks, through the host."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.host)
        return [float(total) for total in tensor]

    def gather(self, value: Any, *, patient: bool = False) -> list[Any]:
        """Every rank's value, on every rank. `patient`: after work that may take some ranks hours, such as a download,
        so that `parallel.timeout_minutes`, which is there to find hangs in training, does not end the run.
        """
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=self._group(patient))
        return everyone

    def broadcast(self, value: Any, *, patient: bool = False) -> Any:
        """Rank 0's value."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group(patient))
        return box[0]

    def _group(self, patient: bool) -> dist.ProcessGroup:
        return self.patient if patient and self.patient is not None else self.host


def join_ranks(run: Run) -> Ranks:
    """Meet the other ranks that torchrun started, on the devices the run asks for."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = _device(run, local_rank)
    timeout = timedelta(minutes=run.parallel.timeout_minutes)
    if "MASTER_ADDR" not in os.environ:  # started as a plain program: a world of one
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port("127.0.0.1")), RANK="0", WORLD_SIZE="1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise UserError(
            "the ranks could not meet",
            evidence=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}",
            cause="the rendezvous port is taken, or the first rank's host cannot be reached",
            fix="start again with another --master-port; `windlass run` picks a free one",
        ) from None
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=device,
        host=gloo_group(timeout),
        saving=gloo_group(timedelta(hours=2)),  # a slow file system is not a hang
        patient=gloo_group(timedelta(days=30)),  # a rank that dies is noticed all the same: its connections close
        tensor=run.parallel.tensor,
        context=run.parallel.context,
    )


def local_world_size() -> int | None:
    """Ranks on this node, as torchrun counts them; None where no launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None


def gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """All ranks, over the host, in a group that one thread alone uses."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # every rank is a member
    return group


def _device(run: Run, local_rank: int) -> torch.device:
    requested = run.resources.gpus_per_node
    present = torch.cuda.device_count()
    if requested == 0 or (requested is None and present == 0):
        if run.resources.threads_per_process:
            torch.set_num_threads(run.resources.threads_per_process)
        return torch.device("cpu")
    if requested is not None and requested > present:
        raise UserError(
            f"{requested} GPUs per node are asked for, {socket.gethostname()} has {present}",
            fix=f"resources.gpus_per_node={present}",
        )
    if local_rank >= present and present and os.environ.get(SHARE_GPUS) == "1":
        local_rank %= present
    if local_rank >= present:
        raise UserError(
            f"rank {local_rank} of {socket.gethostname()} has no GPU: there are {present}",
            fix=f"torchrun --nproc-per-node {present}",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
