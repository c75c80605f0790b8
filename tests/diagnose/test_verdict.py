"""The hard cases: echoes, old attempts, retried warnings, quoted errors, other people's events."""

# ruff: noqa: E501 (messages as they are found in the field)

from __future__ import annotations

import pytest

from windlass.diagnose import Facts, diagnose

PROGRESS = "\n".join(f"2026-11-15 10:0{minute}:00 INFO step={minute}0 loss=2.{minute} tok/s=900" for minute in range(5))
LIBRARY = '  File "/opt/conda/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1739, in _call_impl\n    return forward_call(*args)\n'
MINE = '  File "/workspace/train.py", line 88, in main\n    loss = step(batch)\n'
RAISED_BY_ME = '  File "/workspace/labels.py", line 31, in encode\n    raise ValueError(text)\n'


def traceback(error: str, frames: str = MINE + LIBRARY) -> str:
    return f"Traceback (most recent call last):\n{frames}{error}"


def pod(name="train-worker-0", *, phase="Running", node="node-a", state=None, last=None, containers=None, **more):
    statuses = containers or (
        [{"name": "pytorch", "state": state, "lastState": last or {}, "restartCount": int(bool(last))}] if state else []
    )
    spec = {
        "containers": [{"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": "8"}}}],
        **({"nodeName": node} if node else {}),
    }
    return {"metadata": {"name": name}, "spec": spec, "status": {"phase": phase, "containerStatuses": statuses, **more}}


def event(reason, message, name="train-worker-0", kind="Pod", time="2026-11-15T10:05:00Z", type="Warning"):
    return {
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": kind, "name": name},
        "lastTimestamp": time,
        "type": type,
    }


def exited(code, reason="Error", at="2026-11-15T10:06:00Z"):
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}


RESET = traceback(
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, remote process exited or there was a network error\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nNET/Socket : Connection closed by remote peer"
)
WATCHDOG = "[rank0]:[E1115 10:36:00.1 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600029 milliseconds before timing out."
UNSCHEDULABLE = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available: 4 No preemption victims found for incoming pod."

CASES = {
    "the other ranks only lost the one that failed": (
        "user_code", {"logs": {"rank0": f"{PROGRESS}\n{RESET}", "rank1": f"{PROGRESS}\n{RESET}", "rank5": f"{PROGRESS}\n{traceback('KeyError: 9')}"}}),
    "a watchdog after a user's error on another rank": (
        "user_code", {"logs": {"rank0": f"{PROGRESS}\n{WATCHDOG}", "rank3": f"{PROGRESS}\n2026-11-15 10:26:00 ERROR stop\n{traceback('AttributeError: x')}"}}),
    "a watchdog and nothing else": ("collective_timeout", {"logs": {"rank0": f"{PROGRESS}\n{WATCHDOG}", "rank1": PROGRESS}}),
    "an error of an earlier attempt": (
        "user_import", {"logs": {"rank0": f"{traceback('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')}\n===== attempt 2 =====\n{traceback(chr(77) + 'oduleNotFoundError: No module named x')}"}}),
    "a retried download": (
        "user_code", {"logs": {"rank0": f"WARNING download failed, retrying in 5 s\n{traceback('requests.exceptions.HTTPError: 503 Server Error for url: https://huggingface.co/x')}\nretrying (1/5)\n{PROGRESS}\n{traceback('TypeError: bad operand')}"}}),
    "words inside a training text": (
        "user_code", {"logs": {"rank0": f"{PROGRESS}\nsample: NCCL WARN connection refused, CUDA out of memory, No space left on device\nSegmentation fault\n2026-11-15 10:09:00 INFO step=60 loss=2.2 tok/s=9\n{traceback('IndexError: list index out of range')}"}}),
    "an exception of the user's that quotes others": (
        "user_code", {"logs": {"rank0": f"{PROGRESS}\n" + traceback("ValueError: unknown label 'CUDA out of memory'; known: ['uncorrectable ECC error', 'No space left on device']", MINE + RAISED_BY_ME)}}),
    "an exception raised from a full disk": (
        "disk_full", {"logs": {"rank0": traceback("OSError: [Errno 28] No space left on device: '/ckpt/x'") + "\n\nThe above exception was the direct cause of the following exception:\n\n" + traceback("RuntimeError: saving failed", MINE + '  File "/workspace/save.py", line 3, in save\n    raise RuntimeError("saving failed") from error\n')}}),
    "a sidecar out of memory, the trainer by its own error": (
        "user_code", {"pods": [pod(phase="Failed", containers=[{"name": "pytorch", "state": exited(1)}, {"name": "log-shipper", "state": exited(137, "OOMKilled")}])], "logs": {"rank0": f"{PROGRESS}\n{traceback('KeyError: 1')}"}}),
    "the trainer out of memory": (
        "host_oom", {"pods": [pod(phase="Failed", state=exited(137, "OOMKilled")), pod("train-worker-1", phase="Failed", state=exited(1))], "logs": {"rank1": f"{PROGRESS}\n{RESET}"}}),
    "a crash loop of a container out of memory": (
        "host_oom", {"pods": [pod(state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}, last=exited(137, "OOMKilled"))]}),
    "nodes that wait for one that cannot be scheduled": (
        "gpu_unavailable", {"pods": [pod(state={"running": {}}), pod("train-worker-1", phase="Pending", node="")], "events": [event("FailedScheduling", UNSCHEDULABLE, "train-worker-1")], "logs": {"rank0": traceback("torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/2 clients joined.")}}),
    "the events of another job": (
        "user_import", {"pods": [pod(phase="Failed", state=exited(1))], "events": [event("FailedScheduling", UNSCHEDULABLE, "other-worker-0")], "logs": {"rank0": traceback("ModuleNotFoundError: No module named 'x'")}}),
    "a wait that is over": (
        "running", {"pods": [pod(state={"running": {}})], "events": [event("FailedScheduling", UNSCHEDULABLE, time="2026-11-15T09:00:00Z"), event("Scheduled", "assigned", time="2026-11-15T09:50:00Z", type="Normal")], "logs": {"rank0": PROGRESS}}),
    "a time limit reached because a rank had failed": (
        "user_data", {"slurm": {"sacct": "JobID|State|ExitCode\n9|TIMEOUT|0:0\n"}, "logs": {"rank0": PROGRESS, "rank2": f"{PROGRESS}\n{traceback('json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)')}"}}),
    "a time limit": ("time_limit", {"slurm": {"sacct": "JobID|State|ExitCode\n9|TIMEOUT|0:0\n"}, "logs": {"rank0": f"{PROGRESS}\nslurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-15T10:10:00 DUE TO TIME LIMIT ***\n{RESET}"}}),
    "preemption, and what the ranks said while they left": (
        "preempted", {"pods": [pod(phase="Failed", state=exited(143), conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "default-scheduler: preempting to accommodate a higher priority pod"}])], "logs": {"rank0": f"{PROGRESS}\nreceived SIGTERM\n{RESET}"}}),
    "a GPU's fault, seen by its node": (
        "gpu_hardware", {"pods": [pod(phase="Failed", state=exited(1))], "logs": {"rank0": f"{PROGRESS}\n{traceback('RuntimeError: CUDA error: an illegal memory access was encountered')}", "kernel": "[ 99.1] NVRM: Xid (PCI:0000:1b:00): 79, pid=123, GPU has fallen off the bus."}}),
    "an Xid that applications cause": (
        "illegal_memory_access", {"logs": {"rank0": f"{PROGRESS}\n{traceback('RuntimeError: CUDA error: an illegal memory access was encountered')}", "kernel": "[ 99.1] NVRM: Xid (PCI:0000:1b:00): 31, pid=123, name=python, Ch 00000008, MMU Fault"}}),
    "a node's fault does not excuse a missing module": (
        "user_import", {"logs": {"rank0": traceback("ModuleNotFoundError: No module named 'x'"), "kernel": "[ 99.1] NVRM: Xid (PCI:0000:1b:00): 79, pid=123, GPU has fallen off the bus."}}),
    "a lost node, and connections that broke with it": (
        "node_lost", {"pods": [pod(phase="Failed", reason="NodeLost"), pod("train-worker-1", phase="Failed", node="node-b", state=exited(1))], "nodes": [{"metadata": {"name": "node-a"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting node status."}]}}], "logs": {"rank8": f"{PROGRESS}\n{RESET}"}}),
    "success, whatever the log says": ("succeeded", {"pods": [pod(phase="Succeeded", state=exited(0, "Completed"))], "logs": {"rank0": f"{PROGRESS}\nWARNING: CUDA out of memory in validation, skipped\ntraining finished"}}),
    "a queue that can never take it": ("queue_never", {"workload": {"status": {"conditions": [{"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "couldn't assign flavors to pod set main: insufficient quota for nvidia.com/gpu in flavor gpu, request > maximum capacity (64 > 32)"}]}}}),
    "a queue that is full": ("queue_wait", {"workload": {"status": {"conditions": [{"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor gpu, 8 more needed"}]}}}),
    "no GPU on any node": ("gpu_plugin_missing", {"pods": [pod(phase="Pending", node="")], "events": [event("FailedScheduling", UNSCHEDULABLE)], "nodes": [{"metadata": {"name": "a"}, "status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": "0"}}}]}),
    "the last state of a requeued job": ("time_limit", {"slurm": {"sacct": [{"JobID": "7", "State": "NODE_FAIL", "End": "2026-11-14T01:00:00"}, {"JobID": "7", "State": "TIMEOUT", "End": "2026-11-15T01:00:00"}]}}),
    "one error on all ranks of one file": ("cuda_oom", {"logs": {"launcher": "\n".join(f"[rank{rank}]: {line}" for line in traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB").splitlines() for rank in range(4))}}),
    "an exit by SIGKILL that nobody explains": ("unknown", {"pods": [pod(phase="Failed", state=exited(137))], "logs": {"rank0": PROGRESS}}),
    "nothing": ("unknown", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_hard_case(name):
    expected, facts = CASES[name]
    verdict = diagnose(Facts.read(facts))
    assert verdict.name == expected, verdict.as_dict()


def test_the_root_rank_and_its_line_are_evidence():
    _, facts = CASES["the other ranks only lost the one that failed"]
    verdict = diagnose(Facts.read(facts))
    assert verdict.evidence[0].rank == 5
    assert verdict.evidence[0].line == "KeyError: 9"
    assert verdict.retry == "no"
    answer = verdict.as_dict()
    assert {"class", "kind", "confidence", "cause", "evidence", "retry", "fix", "candidates"} <= set(answer)


def test_what_is_unknown_says_so_and_shows_the_first_errors():
    verdict = diagnose(Facts.read({"logs": {"rank0": "2026-11-15 10:00:00 ERROR the flux capacitor is empty\nbye"}}))
    assert verdict.name == "unknown"
    assert verdict.confidence == 0
    assert "flux capacitor" in verdict.evidence[0].line


def test_two_explanations_lower_the_confidence_and_are_both_named():
    facts = {
        "pods": [pod(phase="Failed", state=exited(137, "OOMKilled", at=None))],
        "logs": {"rank0": traceback("ModuleNotFoundError: No module named 'x'")},
    }
    verdict = diagnose(Facts.read(facts))
    assert verdict.name in ("host_oom", "user_import")
    assert verdict.candidates
    assert verdict.confidence < 0.9


@pytest.mark.parametrize(("when", "name"), [("09:00:00Z", "running"), ("10:30:00Z", "node_lost")])
def test_what_a_node_did_before_the_job_was_there_does_not_count(when, name):
    pod = {
        "metadata": {"name": "train-0", "creationTimestamp": "2026-11-16T10:00:00Z"},
        "spec": {"nodeName": "node2"},
        "status": {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]},
    }
    event = {
        "involvedObject": {"kind": "Node", "name": "node2"},
        "reason": "NodeNotReady",
        "message": "Node node2 status is now: NodeNotReady",
        "lastTimestamp": f"2026-11-16T{when}",
    }
    assert diagnose(Facts.read({"pods": [pod], "events": [event]})).name == name


def test_the_hang_watch_is_believed():
    line = "windlass.trainer.distributed.failures.PeerLostError: rank 1 on sick-1 hangs: no step for 15 s; the others wait in gloo:all_reduce"
    verdict = diagnose(Facts.read({"logs": {"rank0": traceback(line), "rank1": PROGRESS}}))
    assert (verdict.name, verdict.evidence[0].line) == ("hang", line)
