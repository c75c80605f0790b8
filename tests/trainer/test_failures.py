"""Which errors of a rank are worth another attempt, and that every target obeys."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder
from windlass.targets.kubernetes.pod.verdict import NodeEnd, verdict
from windlass.targets.launch.decision import AttemptEnd, Done, RankDeath, follow_up
from windlass.targets.slurm.attempt import JobFacts, decide_with_slurm
from windlass.trainer.distributed.failures import may_retry
from windlass.trainer.main import report_error

# All of the text, as released builds of torch word it: the advice at its end goes with every error.
CUDA = (
    "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
RETRIED = [
    RuntimeError(CUDA.format("uncorrectable ECC error encountered")),
    RuntimeError(CUDA.format("unspecified launch failure")),
    RuntimeError(CUDA.format("an illegal memory access was encountered")),
    RuntimeError(CUDA.format("an illegal instruction was encountered")),
    RuntimeError(CUDA.format("hardware stack error")),
    RuntimeError(CUDA.format("CUDA-capable device(s) is/are busy or unavailable")),
    RuntimeError("NVRM: Xid (PCI:0000:53:00): 79, pid=1234, GPU has fallen off the bus."),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(…)`"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error"
    ),
    dist.DistBackendError("ncclSystemError: System call (e.g. socket, malloc) or external library call failed"),
    RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29411"),
    dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
    dist.DistBackendError(
        "[Rank 1] NCCL watchdog thread terminated with exception: "
        + CUDA.format("uncorrectable NVLink error detected during the execution")
    ),
    RuntimeError("[Rank 6] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=199) ran for 882722 ms"),
    RuntimeError("NCCL communicator was aborted on rank 1."),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"),
    RuntimeError("cuDNN error: CUDNN_STATUS_MAPPING_ERROR"),
    RuntimeError("No CUDA GPUs are available"),
]
GIVEN_UP = [
    UserError("the model cannot be built"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB"),
    RuntimeError(CUDA.format("device-side assert triggered")),
    dist.DistBackendError(
        "NCCL error: ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0"
    ),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x4 and 5x4)"),
    ValueError("illegal memory access is only a word here"),
    KeyError("gloo"),
    # They name what is at fault in other errors.
    RuntimeError("Distributed package doesn't have NCCL built in"),
    RuntimeError("Invalid scalar type for gloo"),
    RuntimeError('Error(s) in loading state_dict for Model:\n\tMissing key(s): "watchdog.weight", "nccl_proj.weight"'),
    RuntimeError("Detected mismatch between collectives on ranks. Rank 0 is running ALLREDUCE, Rank 1 BROADCAST"),
    # Full memory, as the libraries on top of CUDA word it.
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    dist.DistBackendError("ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'"),
    OSError(28, "No space left on device"),
]


def left_by(error: BaseException, tmp_path: Path) -> dict[str, Any]:
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    report_error(folder, 3, error, retry=may_retry(error))
    return dict(json.loads(folder.rank_error(3).read_text()))


def answers(left: dict[str, Any]) -> list[object]:
    """What each target does about it."""
    deaths = [RankDeath(3, int(left["exit_code"]), "12:00:00")]
    end = AttemptEnd(1, errors=[left], deaths=deaths)
    job = JobFacts("RUNNING", 0)
    return [
        follow_up(end, [], 3),
        decide_with_slurm(end, [], job, max_restarts=3, limit_near=False, may_requeue=True),
        verdict([NodeEnd(0, 1, deaths, [left])], [], [], 3),
    ]


@pytest.mark.parametrize("error", RETRIED, ids=lambda error: str(error)[:40])
def test_worth_another_attempt_on_every_target(error: BaseException, tmp_path: Path) -> None:
    left = left_by(error, tmp_path)
    assert left["retry"] is True
    assert left["exit_code"] == ExitCode.RETRY == 75
    for answer in answers(left):
        assert answer.action == "retry", answer
        assert left["error"] in answer.reason, "the reason is in the history, not only an exit code"
        assert socket.gethostname() in answer.reason
        assert "rank 3" in answer.reason
        assert answer.name == left["class"]


@pytest.mark.parametrize("error", GIVEN_UP, ids=lambda error: str(error)[:40])
def test_would_come_again(error: BaseException, tmp_path: Path) -> None:
    left = left_by(error, tmp_path)
    assert left["retry"] is False
    for answer in answers(left):
        assert isinstance(answer, Done), answer
        assert answer.state == "failed"


def test_a_broken_gpu_is_named_with_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    left = left_by(RETRIED[0], tmp_path)
    assert left["error"].startswith(f"GPU 6 of {socket.gethostname()} failed: CUDA error: uncorrectable ECC error")
    assert "Xid" in left["fix"]


def test_a_full_gpu_says_what_to_change(tmp_path: Path) -> None:
    assert "train.micro_batch" in left_by(GIVEN_UP[1], tmp_path)["fix"]
