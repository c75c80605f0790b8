"""What a rank's own error is: a class of the vocabulary of `windlass.diagnose`, told by the rules that judge logs too.

The class and whether it may be retried go into the error file that a rank leaves, where every target reads them.
"""

from __future__ import annotations

import os
import re
import socket
import traceback

import torch
import torch.distributed as dist

from windlass.errors import UserError

ON_THE_GPU = ("gpu_hardware", "gpu_runtime", "illegal_memory_access")
OF_A_PEER = ("nccl_network", "collective_timeout", "nccl_efa", "rendezvous")  # seen when another rank is gone
# A status of a CUDA library that no rule knows: as likely the device's fault as the program's, and tried once.
DEVICE_STATUS = re.compile(r"CUDA error|(?:CUBLAS|CUDNN|CUSOLVER)_STATUS_")


class PeerLostError(Exception):
    """Another rank died or stopped answering."""


def class_of(error: BaseException) -> str:
    """The class of an error; what no rule knows is the program's own mistake."""
    from windlass.diagnose.findings import rule_of  # its rules take a moment to compile, and most ranks never fail
    from windlass.diagnose.timeline import Raised

    if isinstance(error, PeerLostError):
        return "nccl_network"
    if isinstance(error, UserError):  # a full disk, say, is told as one too
        system_error = re.search(r"\[Errno \d+\].*", error.evidence or "")
        return rule_of(Raised("OSError", system_error[0])).name if system_error else "user_arguments"
    frames = tuple((frame.filename, frame.line or "") for frame in traceback.extract_tb(error.__traceback__))
    name = rule_of(Raised(type(error).__name__, str(error), frames)).name
    if name == "user_code" and isinstance(error, RuntimeError) and DEVICE_STATUS.search(str(error)):
        return "illegal_memory_access"
    return "nccl_network" if name == "echo" or (name == "user_code" and isinstance(error, dist.DistError)) else name


def may_retry(error: BaseException) -> bool:
    """Whether another attempt from the last checkpoint may end better."""
    from windlass.diagnose import decision

    return decision.may_retry(class_of(error))


def described(error: BaseException) -> dict[str, str | None]:
    """The error's sentence, its class, evidence, cause and fix; a fault of a GPU names that GPU and its node."""
    from windlass.diagnose.classes import CLASSES

    name = class_of(error)
    known = CLASSES[name]
    first, *rest = str(error).strip().splitlines() or [""]
    sentence = f"{type(error).__name__}: {first}"
    if isinstance(error, PeerLostError):
        sentence = first
    if name in ON_THE_GPU:
        sentence = f"{gpu_name()} of {socket.gethostname()} failed: {first}"
    evidence = "\n".join(line for line in rest if line.strip())[:2000] or None
    is_programs = name in ("user_code", "user_data", "user_arguments")  # its own words say more than ours
    return {
        "error": sentence,
        "class": name,
        "evidence": evidence,
        "cause": None if is_programs else known.cause,
        "fix": None if is_programs else known.fix,
    }


def gpu_name() -> str:
    """This rank's GPU, by everything that is known of it without asking a device that may be gone."""
    index = int(os.environ.get("LOCAL_RANK", "0"))
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    name = f"GPU {visible[index] if index < len(visible) else index}"
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            known = torch.cuda.get_device_properties(torch.cuda.current_device())  # cached by torch
            name += f" ({known.name}, UUID {known.uuid})"
    except (RuntimeError, AssertionError):
        pass
    return name
