"""Whole situations: several sources that must be joined."""

# ruff: noqa: E501 (messages as they are found in the field)

from __future__ import annotations

import pytest

from tests.diagnose.test_verdict import PROGRESS, RESET, WATCHDOG, event, exited, pod
from tests.diagnose.test_verdict import traceback as T
from windlass.diagnose import Facts, diagnose

SCENARIOS = [
    (
        "user_code",
        {
            "logs": {
                "submit": "Submitted batch job 9\n[rank1]: Connection reset by peer\n403 Forbidden: metrics push skipped, read timed out\n"
                + T("KeyError: 3")
            }
        },
    ),
    (
        "user_import",
        {
            "logs": {
                "rank0": T("ModuleNotFoundError: No module named 'x'")
                + "\nException ignored in: <function f at 0x7f>\na\nb\nc\nd"
            }
        },
    ),
    (
        "user_code",
        {
            "logs": {
                "rank0": T("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
                + "\n[default] Worker group FAILED. 3/3 attempts left; will restart worker group\n"
                + T("TypeError: y")
            }
        },
    ),
    ("cancelled", {"logs": {"rank0": PROGRESS + "\n^C" + "\n" + T("KeyboardInterrupt")}}),
    (
        "user_import",
        {
            "logs": {
                "submit": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n====\ntrain.py FAILED\n----\nFailures:\n  <NO_OTHER_FAILURES>\n----\nRoot Cause (first observed failure):\n[0]:\n  time      : 2024-07-24_11:39:43\n  host      : d-9\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 2870757)\n  error_file: /tmp/e.json\n  traceback : Traceback (most recent call last):\n    File \"/w/train.py\", line 3, in main\n      import foo\n  ModuleNotFoundError: No module named 'foo'\n===="
            }
        },
    ),
    (
        "time_limit",
        {
            "job": {
                "kind": "PyTorchJob",
                "status": {
                    "conditions": [
                        {
                            "type": "Failed",
                            "status": "True",
                            "reason": "PyTorchJobFailed",
                            "message": "PyTorchJob x has failed because it was active longer than specified deadline",
                        }
                    ]
                },
            },
            "logs": {"rank0": PROGRESS},
        },
    ),
    (
        "gpu_unavailable",
        {
            "pods": [
                pod(
                    phase="Failed",
                    reason="OutOfnvidia.com/gpu",
                    message="Pod was rejected: Node didn't have enough resource: nvidia.com/gpu, requested: 8, used: 8, capacity: 8",
                )
            ]
        },
    ),
    (
        "config_missing",
        {
            "job": {"metadata": {"name": "train"}},
            "events": [
                event(
                    "FailedCreate",
                    'Error creating: pods "train-" is forbidden: error looking up service account team/trainer: serviceaccount "trainer" not found',
                    "train",
                    "Job",
                )
            ],
        },
    ),
    (
        "clock_skew",
        {"logs": {"rank0": "srun: error: Task launch for 36.0 failed on node cn131: Job credential expired"}},
    ),
    (
        "collective_mismatch",
        {"logs": {"rank0": WATCHDOG, "rank1": WATCHDOG.replace("rank0", "rank1").replace("ALLREDUCE", "BROADCAST")}},
    ),
    (
        "dns",
        {
            "pods": [
                pod(phase="Pending", containers=None)
                | {
                    "status": {
                        "phase": "Pending",
                        "initContainerStatuses": [
                            {"name": "init-pytorch", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
                        ],
                        "containerStatuses": [{"name": "pytorch", "state": {"waiting": {"reason": "PodInitializing"}}}],
                    }
                }
            ],
            "logs": {"init": "nslookup: can't resolve 'train-master-0': Name or service not known\n"},
        },
    ),
    (
        "dns",
        {
            "logs": {
                "rank1": "\n".join(
                    "[W socket.cpp:697] [c10d] The IPv6 network addresses of (train-master-0, 29500) cannot be retrieved (gai error: -2 - Name or service not known)."
                    for _ in range(20)
                )
                + "\n"
                + T(
                    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (train-master-0, 29500)."
                )
            }
        },
    ),
    (
        "node_lost",
        {
            "slurm": {
                "sacct": {
                    "jobs": [
                        {
                            "job_id": 5,
                            "state": {"current": ["NODE_FAIL"], "reason": "None"},
                            "exit_code": {"return_code": {"set": True, "number": 0}},
                        }
                    ]
                }
            }
        },
    ),
    (
        "host_oom",
        {
            "slurm": {
                "sacct": {
                    "jobs": [
                        {
                            "job_id": 5,
                            "state": {"current": ["FAILED"], "reason": "None"},
                            "exit_code": {"return_code": {"set": True, "number": 1}},
                            "steps": [{"step": {"id": "5.0", "name": "python"}, "state": ["OUT_OF_MEMORY"]}],
                        }
                    ]
                }
            }
        },
    ),
    (
        "preempted",
        {
            "pods": [pod(phase="Failed", state=exited(143))],
            "nodes": [
                {
                    "metadata": {"name": "node-a"},
                    "spec": {"taints": [{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]},
                }
            ],
            "logs": {"rank0": PROGRESS + "\nreceived SIGTERM"},
        },
    ),
    (
        "preempted",
        {
            "pods": [
                pod(
                    phase="Failed",
                    reason="Terminated",
                    message="Pod was terminated in response to imminent node shutdown.",
                )
            ]
        },
    ),
    (
        "user_code",
        {
            "pods": [
                pod(phase="Failed", state=exited(1)),
                pod("train-worker-1", phase="Failed", node="node-b", state=exited(143)),
            ],
            "events": [event("Killing", "Stopping container pytorch", "train-worker-1", type="Normal")],
            "logs": {"rank0": PROGRESS + "\n" + T("TypeError: x"), "rank1": PROGRESS + "\nreceived signal 15"},
        },
    ),
    (
        "cuda_oom",
        {
            "logs": {
                "rank0": PROGRESS
                + "\nOutOfMemory caught, retrying with smaller batch\n"
                + T("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
                + "\n\nDuring handling of the above exception, another exception occurred:\n\n"
                + T("RuntimeError: could not save state")
            }
        },
    ),
    (
        "file_system",
        {
            "pods": [pod(phase="Failed", state=exited(1))],
            "logs": {
                "rank3": PROGRESS + "\n" + T("OSError: [Errno 5] Input/output error: '/fsx/a'"),
                "rank0": PROGRESS + "\n" + WATCHDOG,
            },
        },
    ),
    (
        "image_auth",
        {
            "pods": [
                pod(
                    phase="Pending",
                    state={
                        "waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "ghcr.io/a/b:1"'}
                    },
                )
            ],
            "events": [
                event(
                    "Failed",
                    'Failed to pull image "ghcr.io/a/b:1": failed to authorize: failed to fetch oauth token: denied: denied',
                )
            ],
        },
    ),
    (
        "volume_unbound",
        {
            "pods": [
                pod(
                    phase="Pending",
                    node="",
                    conditions=[
                        {
                            "type": "PodScheduled",
                            "status": "False",
                            "reason": "Unschedulable",
                            "message": "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/3",
                        }
                    ],
                )
            ]
        },
    ),
    (
        "queue_wait",
        {
            "pods": [
                pod(
                    phase="Pending",
                    node="",
                    conditions=[
                        {
                            "type": "PodScheduled",
                            "status": "False",
                            "reason": "SchedulingGated",
                            "message": "Scheduling is blocked due to non-empty scheduling gates",
                        }
                    ],
                )
            ]
        },
    ),
    (
        "gpu_arch",
        {
            "logs": {
                "rank0": "/opt/x/torch/cuda/__init__.py:230: UserWarning: NVIDIA B200 with CUDA capability sm_100 is not compatible with the current PyTorch installation.\n"
                + T("RuntimeError: CUDA error: no kernel image is available for execution on the device")
            }
        },
    ),
    (
        "hub_gated",
        {
            "logs": {
                "rank0": T(
                    "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/meta-llama/x/resolve/main/config.json"
                )
                + "\n\nThe above exception was the direct cause of the following exception:\n\n"
                + T("OSError: You are trying to access a gated repo.")
            }
        },
    ),
    ("segfault", {"pods": [pod(phase="Failed", state=exited(139))], "logs": {"rank0": PROGRESS}}),
    (
        "user_arguments",
        {
            "pods": [pod(phase="Failed", state=exited(2))],
            "logs": {"rank0": "usage: train.py [-h]\ntrain.py: error: argument --lr: invalid float value: 'abc'"},
        },
    ),
    (
        "running",
        {
            "slurm": {"scontrol": "JobId=3 JobName=x\n JobState=RUNNING Reason=None"},
            "logs": {"rank0": PROGRESS + "\n[W1115 10:04:00 socket.cpp:464] [c10d] Connection reset by peer, retrying"},
        },
    ),
    (
        "host_oom",
        {
            "pods": [pod(phase="Failed", state=exited(137))],
            "logs": {
                "kernel": "[1] Memory cgroup out of memory: Killed process 123 (python) total-vm:1kB",
                "rank0": PROGRESS,
            },
        },
    ),
    (
        "nccl_network",
        {
            "logs": {
                "rank0": T(
                    "torch.distributed.DistBackendError: NCCL error in: x, unhandled system error\nncclSystemError: System call failed.\nLast error:\nsocketStartConnect: Connect to 169.254.3.1<4567> failed : Connection refused"
                ),
                "rank1": RESET,
            }
        },
    ),
    (
        "api_credentials",
        {"slurm": {"scontrol": {"jobs": [{"job_id": 1, "job_state": ["PENDING"], "state_reason": "InvalidAccount"}]}}},
    ),
    (
        "evicted_disk",
        {
            "pods": [
                pod(
                    phase="Failed",
                    reason="Evicted",
                    message="Pod ephemeral local storage usage exceeds the total limit of containers 50Gi.",
                )
            ]
        },
    ),
    (
        "checkpoint_damaged",
        {
            "logs": {
                "rank0": "resuming from /ckpt/step-100\n"
                + T("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"),
                "rank1": RESET,
            }
        },
    ),
    (
        "straggler",
        {
            "pods": [pod(state={"running": {}})],
            "logs": {"rank0": PROGRESS + "\nGPU performance: rank 3 is a straggler (score 0.41), others 0.98"},
        },
    ),
]


@pytest.mark.parametrize(
    ("expected", "facts"), SCENARIOS, ids=[f"{name}-{index}" for index, (name, _) in enumerate(SCENARIOS)]
)
def test_scenario(expected, facts):
    verdict = diagnose(Facts.read(facts))
    assert verdict.name == expected, verdict.as_dict()
