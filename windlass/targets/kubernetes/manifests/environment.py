"""The variables of a pod: what the entry reads, and the few settings that NCCL and torch do not find themselves."""

from __future__ import annotations

from typing import Any

from windlass.runfolder import RUNS_VARIABLE
from windlass.spec import Run
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind
from windlass.targets.kubernetes.manifests.labels import SUBMISSION_LABEL, safe_name
from windlass.targets.kubernetes.manifests.resources import NodeShape
from windlass.targets.kubernetes.pod import interface as names
from windlass.targets.launch.torchrun import FAULTS_VARIABLE

Variable = dict[str, Any]

# The container networks of a host, and the link of EKS Pod Identity, lead to no other pod.
NOT_FOR_NCCL = "^lo,docker,veth,eni,pod-id-link0"
KUBEFLOW_INDEX, KUBEFLOW_ROLE = "training.kubeflow.org/replica-index", "training.kubeflow.org/replica-type"
JOB_INDEX = "batch.kubernetes.io/job-completion-index"


def variables(run: Run, kind: JobKind, shape: NodeShape, *, shared: bool, faults: str | None) -> list[Variable]:
    options = run.target.kubernetes
    plain = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": str(run.resources.threads_per_process or 1),
        RUNS_VARIABLE: names.RUNS,
        names.SHARED_VARIABLE: "1" if shared else "0",
        names.HOST_VARIABLE: host_name(run),
        names.PORT_VARIABLE: str(run.target.port or names.COORDINATOR_PORT),
        names.NODES_VARIABLE: str(run.resources.nodes),
        names.MIN_NODES_VARIABLE: str(options.min_nodes or run.resources.nodes),
        names.LAUNCHER_VARIABLE: "hyperpodrun" if kind is JobKind.HYPERPOD else "torchrun",
        **(_of_gpus(run, shape) if shape.gpus else {}),
        **({FAULTS_VARIABLE: faults} if faults else {}),
        **options.environment,
    }
    fields = {
        **names.POD_VARIABLES,
        names.SUBMISSION_VARIABLE: f"metadata.labels['{SUBMISSION_LABEL}']",
        **_index(kind),
    }
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]


def host_name(run: Run) -> str:
    """The service that leads to node 0's pod, whichever pod that is at the time."""
    return f"{safe_name(run.name)}-host"


def _index(kind: JobKind) -> dict[str, str]:
    """Where a pod of each kind finds its number."""
    match kind:
        case JobKind.PYTORCHJOB:
            return {
                names.INDEX_VARIABLE: f"metadata.labels['{KUBEFLOW_INDEX}']",
                names.ROLE_VARIABLE: f"metadata.labels['{KUBEFLOW_ROLE}']",
            }
        case JobKind.HYPERPOD:
            return {}  # its operator tells the agent
    return {names.INDEX_VARIABLE: f"metadata.annotations['{JOB_INDEX}']"}


def _of_gpus(run: Run, shape: NodeShape) -> dict[str, str]:
    """Sizes and protocols are left to NCCL and the EFA plugin, which know the platform better."""
    settings = {
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": NOT_FOR_NCCL,
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "20000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{names.RUNS}/{run.name}/logs/nccl-trace-rank-",
    }
    if shape.instance and shape.instance.efa == 0:
        settings["NCCL_NET"] = "Socket"  # said out loud, so that a log with it is no silent fallback
    return settings
