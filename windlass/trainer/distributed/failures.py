"""What a rank's error means: worth another attempt from the last checkpoint, or not.

One table for all targets: they obey the `retry` of the error file that a rank leaves. What is retried is bounded by
the restarts that a run may take without a new checkpoint, so an error that does come again ends the run after all.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from windlass.errors import UserError


@dataclass(frozen=True)
class Kind:
    """One kind of failure, told by phrases of the error's text (in lower case)."""

    name: str
    retry: bool
    phrases: tuple[str, ...]
    cause: str | None = None
    fix: str | None = None


MEMORY = Kind(
    "memory",
    retry=False,
    phrases=(
        "cuda out of memory",
        "out of memory. tried to allocate",
        "cuda error: out of memory",
        "triton error [cuda]: out of memory",
        "'out of memory'",  # NCCL's: Cuda failure 2 'out of memory'
        "cublas_status_alloc_failed",
        "cudnn_status_alloc_failed",
    ),
    cause="the GPU's memory is full; it would be again in the same step",
    fix="a smaller train.micro_batch, or parallel.activation_checkpointing=full; `windlass plan` says what fits",
)
USAGE = Kind(
    "usage",
    retry=False,
    # An index beyond a table is the data's or the model's mistake, and comes again with the same batch.
    phrases=(
        "device-side assert triggered",
        "mismatch between collectives",
        "ncclinvalidusage",
        "ncclinvalidargument",
        "invalid usage",
        "duplicate gpu detected",
    ),
)
GPU = Kind(
    "gpu",
    retry=True,
    # CUDA's own sentences (cudaGetErrorString), the driver's, and those of the libraries on top of it.
    phrases=(
        "uncorrectable ecc error",
        "uncorrectable nvlink error",
        "ecc error",
        "unspecified launch failure",
        "illegal memory access",
        "illegal instruction was encountered",
        "illegal address",
        "misaligned address",
        "hardware stack error",
        "invalid program counter",
        "operation not supported on global/shared address space",
        "the launch timed out and was terminated",
        "fallen off the bus",
        "gpu is lost",
        "gpu requires reset",
        "gpu has been reset",
        "row remap",
        "nvrm: xid",
        "xid (pci",
        "cuda-capable device(s) is/are busy or unavailable",
        "no cuda-capable device is detected",
        "no cuda gpus are available",
        "external device",
        "cuda error: unknown error",
        "mps server",
        "mps client",
        "cublas_status_execution_failed",
        "cublas_status_internal_error",
        "cudnn_status_execution_failed",
        "cudnn_status_internal_error",
        "cublas_status_mapping_error",
        "cudnn_status_mapping_error",
        "system not yet initialized",  # the fabric manager of NVSwitch machines
        "system driver mismatch",
    ),
    cause="a fault of this GPU or its driver, or a kernel that wrote where it must not",
    fix="if it comes again on the same GPU, take the node out of the pool; `nvidia-smi -q` and dmesg (Xid) say more",
)
PEER = Kind(
    "peer",
    retry=True,
    phrases=(
        "connection closed",
        "connection reset",
        "connection refused",
        "broken pipe",
        "timed out",
        "socket timeout",
        # Not their bare names: a torch without NCCL, or a parameter that is called so, comes again.
        "gloo/transport",
        "gloo/rendezvous",
        "gloo connect",
        "nccl error",
        "nccl communicator",
        "ncclremoteerror",
        "ncclsystemerror",
        "ncclinternalerror",
        "ncclunhandledcudaerror",
        "remote process exited",
        "watchdog caught",
        "watchdog thread",
    ),
    cause="another rank, or the network to it, was lost",
)
TABLE = (MEMORY, USAGE, GPU, PEER)  # the first that fits
UNKNOWN = Kind("unknown", retry=False, phrases=())
# Raised by torch for what happens on a device or in a group; other types are the program's own mistakes.
TORCH_ERRORS: tuple[type[BaseException], ...] = (RuntimeError, dist.DistError)


class PeerLostError(Exception):
    """Another rank died or stopped answering."""


def kind_of(error: BaseException) -> Kind:
    """Which kind of failure an error is; errors of users and of the program itself are UNKNOWN and not retried."""
    if isinstance(error, UserError):
        return UNKNOWN
    if isinstance(error, PeerLostError):
        return PEER
    if isinstance(error, torch.OutOfMemoryError):
        return MEMORY
    if not isinstance(error, TORCH_ERRORS):
        return UNKNOWN
    text = str(error).lower()
    for kind in TABLE:
        if any(phrase in text for phrase in kind.phrases):
            return kind
    return PEER if isinstance(error, dist.DistError) else UNKNOWN


def described(error: BaseException) -> dict[str, str | None]:
    """The error's sentence, its evidence, cause and fix; a fault of a GPU names that GPU and its node."""
    kind = kind_of(error)
    first, *rest = str(error).strip().splitlines() or [""]
    sentence = f"{type(error).__name__}: {first}"
    if isinstance(error, PeerLostError):
        sentence = first
    if kind is GPU:
        sentence = f"{gpu_name()} of {socket.gethostname()} failed: {first}"
    evidence = "\n".join(line for line in rest if line.strip())[:2000] or None
    return {"error": sentence, "evidence": evidence, "cause": kind.cause, "fix": kind.fix}


def gpu_name() -> str:
    """This rank's GPU, by everything that is known of it without asking a device that may be gone."""
    index = int(os.environ.get("LOCAL_RANK", "0"))
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    name = f"GPU {visible[index] if index < len(visible) else index}"
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            known = torch.cuda.get_device_properties(torch.cuda.current_device())  # cached by torch
            name += f" ({known.name}, UUID {known.uuid})"
    except (RuntimeError, AssertionError):
        pass
    return name
