"""One fixture per rule and more: what is said, and the class that it speaks for."""

# ruff: noqa: E501 (messages as they are found in the field)

from __future__ import annotations

import pytest

from tests.diagnose.said import EXCEPTIONS, LINES
from tests.diagnose.test_verdict import PROGRESS, event, exited, pod, traceback
from windlass.diagnose import Facts, diagnose
from windlass.diagnose.classes import CLASSES
from windlass.diagnose.rules import RULES

CONTAINERS = {
    "image_missing": [("ErrImagePull", 'failed to pull and unpack image "docker.io/a/b:v9": failed to resolve reference: docker.io/a/b:v9: not found'), ("InvalidImageName", "couldn't parse image name"), ("ImagePullBackOff", 'Back-off pulling image "r/x:1": ErrImagePull: manifest unknown')],
    "image_auth": [("ErrImagePull", "failed to authorize: failed to fetch anonymous token: unexpected status: 401 Unauthorized"), ("ErrImagePull", "pull access denied for team/private, no basic auth credentials"), ("ImagePullBackOff", "unexpected status code 403 Forbidden")],
    "image_rate_limit": [("ErrImagePull", "toomanyrequests: You have reached your pull rate limit."), ("ErrImagePull", "failed to do request: Head https://reg/v2: dial tcp 10.0.0.1:443: i/o timeout"), ("ErrImagePull", "rpc error: code = DeadlineExceeded desc = context deadline exceeded")],
    "image_platform": [("ErrImagePull", "no match for platform in manifest: not found")],
    "config_missing": [("CreateContainerConfigError", 'secret "hf-token" not found'), ("CreateContainerConfigError", "couldn't find key token in Secret team/hf-token")],
    "gpu_runtime": [("RunContainerError", "failed to create task: OCI runtime create failed: nvidia-container-cli: initialization error: nvml error: driver not loaded")],
    "container_start": [("RunContainerError", 'failed to start container: exec: "torchrn": executable file not found in $PATH'), ("CreateContainerError", "failed to create containerd task: chdir to cwd (\"/nope\") set in config.json failed: no such file or directory")],
    "mount_failed": [("CreateContainerError", 'failed to generate container: error mounting "/var/x" to rootfs at "/data"')],
}  # fmt: skip
EVENTS = {
    "volume_unbound": [("FailedScheduling", "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims."), ("FailedAttachVolume", 'Multi-Attach error for volume "pvc-1" Volume is already exclusively attached to one node'), ("FailedScheduling", 'persistentvolumeclaim "data" not found')],
    "mount_failed": [("FailedMount", 'MountVolume.SetUp failed for volume "fsx" : rpc error: code = Internal desc = Could not mount "fs-1.fsx.us-west-2.amazonaws.com@tcp:/abc": Is the MGS running?'), ("FailedMount", 'MountVolume.MountDevice failed: driver name efs.csi.aws.com not found in the list of registered CSI drivers')],
    "config_missing": [("FailedMount", 'MountVolume.SetUp failed for volume "cfg" : configmap "train-config" not found')],
    "ip_exhausted": [("FailedCreatePodSandBox", 'Failed to create pod sandbox: plugin type="aws-cni" failed (add): add cmd: failed to assign an IP address to container')],
    "efa_unavailable": [("FailedScheduling", "0/4 nodes are available: 4 Insufficient vpc.amazonaws.com/efa.")],
    "gpu_unavailable": [("FailedScheduling", "0/5 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 4 Insufficient nvidia.com/gpu.")],
    "cpu_memory_request": [("FailedScheduling", "0/3 nodes are available: 3 Insufficient memory."), ("FailedScheduling", "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 Insufficient cpu.")],
    "taint": [("FailedScheduling", "0/3 nodes are available: 3 node(s) had untolerated taint {nvidia.com/gpu: present}.")],
    "node_affinity": [("FailedScheduling", "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.")],
    "pod_limit": [("FailedScheduling", "0/2 nodes are available: 2 Too many pods.")],
    "cloud_capacity": [("FailedScaleUp", "InsufficientInstanceCapacity: We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested")],
}  # fmt: skip
SUBMISSIONS = {
    "operator_missing": ['error: resource mapping not found for name: "x" namespace: "" from "job.yaml": no matches for kind "PyTorchJob" in version "kubeflow.org/v1"'],
    "schema_mismatch": ['Error from server (BadRequest): error when creating "job.yaml": PyTorchJob in version "v1" cannot be handled as a PyTorchJob: strict decoding error: unknown field "spec.foo"'],
    "quota": ['Error from server (Forbidden): pods "x" is forbidden: exceeded quota: team, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8'],
    "admission_denied": ['Error from server (Forbidden): pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false', 'Error from server: admission webhook "validate.kyverno.svc-fail" denied the request: policy disallow-latest-tag'],
    "api_forbidden": ['Error from server (Forbidden): pods is forbidden: User "jane" cannot create resource "pods" in API group "" in the namespace "prod"'],
    "api_credentials": ["error: You must be logged in to the server (Unauthorized)", "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"],
    "api_unreachable": ["Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout", 'Error from server (InternalError): Internal error occurred: failed calling webhook "x.io": Post "https://x.svc": context deadline exceeded', "sbatch: error: Unable to contact slurm controller (connect failure)"],
    "queue_never": ["sbatch: error: Batch job submission failed: Requested node configuration is not available", "sbatch: error: invalid partition specified: gpux"],
}  # fmt: skip
SLURM = {
    "queue_wait": [("PENDING", "Priority"), ("PENDING", "Resources"), ("PENDING", "QOSMaxGRESPerUser"), ("PENDING", "AssocGrpGRES")],
    "queue_never": [("PENDING", "PartitionTimeLimit"), ("PENDING", "BadConstraints"), ("PENDING", "QOSMaxGRESPerJob"), ("PENDING", "QOSMaxWallDurationPerJobLimit")],
    "job_held": [("PENDING", "JobHeldUser"), ("PENDING", "JobHeldAdmin"), ("PENDING", "DependencyNeverSatisfied")],
    "api_credentials": [("PENDING", "InvalidAccount")],
    "host_oom": [("OUT_OF_MEMORY", "")],
    "node_lost": [("NODE_FAIL", "")],
    "preempted": [("PREEMPTED", "")],
    "time_limit": [("TIMEOUT", "")],
    "cancelled": [("CANCELLED by 1000", "")],
}  # fmt: skip
PODS = {
    "evicted_disk": [{"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}],
    "evicted_memory": [{"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}],
    "host_oom": [{"phase": "Failed", "state": exited(137, "OOMKilled")}],
    "segfault": [{"phase": "Failed", "state": exited(139)}],
    "node_lost": [{"phase": "Failed", "reason": "NodeLost"}],
    "running": [{"phase": "Running", "state": {"running": {}}}, {"phase": "Pending", "state": {"waiting": {"reason": "ContainerCreating"}}}],
    "succeeded": [{"phase": "Succeeded", "state": exited(0, "Completed")}],
}  # fmt: skip

ENDS = {  # what a run folder tells of the end of a run on this machine
    "disk_full": ["the disk of /data/runs/my is full; rank 0 exited with code 1"],
    "killed": ["its supervisor was killed; `windlass run` goes on from the last checkpoint"],
    "node_lost": ["the machine was restarted while it trained; `windlass run` goes on from the last checkpoint", "its supervisor on b has been silent for 5 min; `windlass run` goes on from the last checkpoint"],
}  # fmt: skip


def facts_of():
    for name, texts in EXCEPTIONS.items():
        for text in texts:
            yield name, {"logs": {"rank0": f"{PROGRESS}\n{traceback(text)}"}}
    for name, texts in LINES.items():
        for text in texts:
            yield name, {"logs": {"rank0": f"{PROGRESS}\n{text}"}}
    for name, states in CONTAINERS.items():
        for reason, message in states:
            yield name, {"pods": [pod(phase="Pending", state={"waiting": {"reason": reason, "message": message}})]}
    for name, events in EVENTS.items():
        for reason, message in events:
            yield name, {"pods": [pod(phase="Pending", node="")], "events": [event(reason, message)]}
    for name, texts in SUBMISSIONS.items():
        for text in texts:
            yield name, {"logs": {"submit": text}}
    for name, records in SLURM.items():
        for state, reason in records:
            yield (
                name,
                {
                    "slurm": {
                        "scontrol": f"JobId=7 JobName=x\n   JobState={state.replace(' ', '_')} Reason={reason or 'None'} Dependency=(null)\n"
                    }
                },
            )
    for name, pods in PODS.items():
        for values in pods:
            yield name, {"pods": [pod(**values)]}
    for name, reasons in ENDS.items():
        for reason in reasons:
            failed = {"type": "Failed", "status": "True", "reason": "", "message": reason}
            yield name, {"logs": {"rank0": PROGRESS}, "job": {"status": {"conditions": [failed]}}}


FIXTURES = list(facts_of())


@pytest.mark.parametrize(
    ("name", "facts"), FIXTURES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(FIXTURES)]
)
def test_fixture(name, facts):
    verdict = diagnose(Facts.read(facts))
    assert verdict.name == name, verdict.as_dict()
    assert verdict.cause
    assert verdict.fix
    assert verdict.evidence or name in ("running", "succeeded")


def test_rules_speak_of_known_classes_and_most_classes_have_rules():
    names = {rule.name for rule in RULES}
    assert names - set(CLASSES) == {"echo"}
    by_other_means = {
        "gpu_plugin_missing",
        "efa_unavailable",
        "taint",
        "pod_limit",
        "nccl_slow_fallback",
        "straggler",
        "running",
        "succeeded",
    }
    assert set(CLASSES) - names == by_other_means
    assert len(CLASSES) >= 60


def test_every_class_has_a_fixture():
    shown = {name for name, _ in FIXTURES}
    elsewhere = {"gpu_plugin_missing", "unknown", "inodes_full", "hang", "straggler", "nccl_slow_fallback"}
    assert set(CLASSES) - shown == elsewhere


RHYTHM = {
    "hang": {"pods": [pod(state={"running": {}})], "logs": {"rank0": PROGRESS}, "events": [event("Heartbeat", "still there", time="2026-11-15T12:00:00Z", type="Normal")]},
    "straggler": {"logs": {f"rank{rank}": "\n".join(f"step {step} loss 2.0 compute_time={4.0 if rank == 2 else 1.0} s" for step in range(5)) for rank in range(4)}},
    "nccl_slow_fallback": {"logs": {"rank0": f"node:1:2 [0] NCCL INFO NET/OFI Failed to initialize: No eligible providers were found\nnode:1:2 [0] NCCL INFO Using network Socket\n{PROGRESS}"}},
    "inodes_full": {"logs": {"rank0": f"df -i /data: inodes 100% used\n{traceback('OSError: [Errno 28] No space left on device')}"}},
    "nan": {"logs": {"rank0": "\n".join(f"step {step} loss nan lr 1e-4" for step in range(5))}},
}  # fmt: skip


@pytest.mark.parametrize("name", RHYTHM)
def test_rhythm(name):
    verdict = diagnose(Facts.read(RHYTHM[name]))
    assert verdict.name == name, verdict.as_dict()
