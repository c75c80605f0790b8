"""The classes of failure: their ids are the vocabulary of the rules, of the JSON answer and of docs/why.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["user", "infra", "resources", "access", "image", "lifecycle", "training", "unknown"]
Retry = Literal["yes", "no", "wait", "policy"]


@dataclass(frozen=True)
class FailureClass:
    """One class: whose matter it is, whether another attempt helps, what happened and what to do."""

    name: str
    kind: Kind
    retry: Retry
    cause: str
    fix: str


_TABLE: tuple[tuple[str, Kind, Retry, str, str], ...] = (
    # scheduling
    ("gpu_unavailable", "resources", "wait", "Not enough GPUs are free for its pods.",
     "wait, or ask for fewer: windlass run … resources.nodes=N"),
    ("gpu_plugin_missing", "infra", "no", "The nodes offer no GPU at all: the device plugin is absent or broken.",
     "install the NVIDIA device plugin; kubectl describe node NODE must show nvidia.com/gpu under Allocatable"),
    ("efa_unavailable", "resources", "yes", "The nodes do not offer as many EFA interfaces as each pod asks for.",
     "target.kubernetes.efa=N with what the instance has, or 0"),
    ("cpu_memory_request", "resources", "yes", "Each pod asks for more CPU or memory than a node can give.",
     "target.kubernetes.cpu=… target.kubernetes.memory=… below what kubectl describe node shows as Allocatable"),
    ("taint", "resources", "yes", "Nodes that would fit have a taint that the pods do not tolerate.",
     "target.kubernetes.tolerations=[…] for the taint named above; never for one that marks a sick node"),
    ("node_affinity", "user", "yes", "No node has the labels that its selector or affinity asks for.",
     "kubectl get nodes --show-labels, then target.kubernetes.node_selector={…} or resources.instance=…"),
    ("pod_limit", "resources", "wait", "The nodes run as many pods as they may.",
     "wait for others to end, or raise the kubelet's limit of pods"),
    ("queue_wait", "lifecycle", "wait", "It waits in the queue: quota, priority or nodes in use by others.",
     "wait; windlass show RUN says where it stands"),
    ("queue_never", "user", "no", "The queue can never take it as it is: it asks for more than the queue gives.",
     "ask for less (resources.nodes, target.slurm.time) or name another queue or partition"),
    ("job_held", "lifecycle", "no", "It is held, or waits for a job that will never end well.",
     "scontrol release JOB, or ask who holds it"),
    ("quota", "resources", "no", "A quota or limit of the namespace refuses its pods.",
     "kubectl describe resourcequota,limitrange; ask for less, or for a larger quota"),
    ("cloud_capacity", "infra", "wait", "The cloud has no machine of this type to give at the moment.",
     "another zone or instance type, a capacity block, or wait"),
    # the API
    ("operator_missing", "infra", "no", "The cluster does not know this kind of job: its operator is not installed.",
     "install the operator, or target.kubernetes.job=… with a kind that the cluster serves"),
    ("schema_mismatch", "infra", "yes", "The cluster's version of this kind of object does not know a field that"
            " was sent.",
     "kubectl explain KIND shows the served version; install matching versions of operator and client"),
    ("admission_denied", "access", "no", "A policy of the cluster refuses the object.",
     "change what the policy names (target.kubernetes.pod={…}), or ask who runs the cluster"),
    ("api_forbidden", "access", "no", "This user may not do that in this namespace.",
     "kubectl auth can-i VERB RESOURCE; ask for a role that has it"),
    ("api_credentials", "access", "no", "The credentials are wrong, expired or of another account.",
     "sign in again; for Slurm target.slurm.account=… (sacctmgr show assoc user=$USER)"),
    ("api_unreachable", "infra", "yes", "The API server, a webhook or the Slurm controller did not answer in time.",
     "try again; if it stays: kubectl get --raw /readyz, or scontrol ping"),
    # image and start
    ("image_auth", "access", "no", "The registry does not let the node pull the image.",
     "target.kubernetes.image_pull_secrets=[SECRET], or the permission of the nodes' role"),
    ("image_missing", "image", "no", "There is no image of that name or tag.",
     "windlass image push, or target.kubernetes.image=NAME:TAG that exists"),
    ("image_rate_limit", "infra", "yes", "The registry limits pulls, is slow or cannot be reached from the nodes.",
     "mirror the image to a registry nearby and set target.kubernetes.image"),
    ("image_platform", "image", "no", "The image was built for another processor architecture.",
     "windlass image build image.platform=linux/amd64 (or the platform of the nodes)"),
    ("mount_failed", "infra", "no", "A volume could not be mounted.",
     "kubectl describe pod; check the CSI driver, the path, its permissions and security groups"),
    ("volume_unbound", "infra", "no", "A volume claim is missing, not bound, or attached to another node.",
     "kubectl get pvc; use a storage class with ReadWriteMany for several nodes"),
    ("ip_exhausted", "infra", "wait", "The pod got no network: no address is free, or the CNI failed.",
     "free addresses in the subnet, or wait; check the CNI pods of the node"),
    ("config_missing", "user", "no", "A secret, config map or key that the pod names does not exist.",
     "kubectl create secret …, or target.kubernetes.secrets"),
    ("gpu_runtime", "infra", "no", "The container runtime cannot hand out the GPU: driver or toolkit of the node.",
     "nvidia-smi on the node; reinstall the driver or the NVIDIA container toolkit"),
    ("container_start", "image", "no", "The container's command cannot be started.",
     "check the entrypoint, the working directory and the mode of the file in the image"),
    # memory and disks
    ("host_oom", "resources", "policy", "The kernel killed it: the memory limit of the container, job or node was"
            " reached.",
     "target.kubernetes.memory=… or target.slurm.memory=… larger; fewer loader workers; a smaller train.micro_batch"),
    ("evicted_disk", "resources", "yes", "The node evicted the pod: local disk space ran short.",
     "put caches and checkpoints on a volume (target.kubernetes.storage, HF_HOME)"),
    ("evicted_memory", "infra", "yes", "The node evicted the pod: the node as a whole ran short of memory.",
     "target.kubernetes.memory=… so that the request says what it needs; try again"),
    ("shm", "resources", "yes", "Shared memory (/dev/shm) is too small for the data loaders or NCCL.",
     "target.kubernetes.shm=… larger, docker --shm-size, or fewer loader workers"),
    ("cuda_oom", "resources", "policy", "The GPU's memory is full.",
     "a smaller train.micro_batch, or parallel.activation_checkpointing=full; windlass plan says what fits"),
    ("cuda_oom_fragmentation", "resources", "policy", "The GPU's memory is fragmented: much is reserved but not in"
            " use.",
     "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or a smaller train.micro_batch"),
    ("cuda_oom_other_process", "infra", "yes", "Another process holds the GPU's memory.",
     "nvidia-smi on the node; end the other process, or take another node"),
    ("disk_full", "resources", "no", "A disk is full, or a quota on it is used up.",
     "windlass ckpt prune RUN, checkpoint.keep=N, or a larger volume"),
    ("inodes_full", "resources", "no", "The file system has no inodes left: too many small files.",
     "df -i; delete small files, or pack the data into shards: windlass data tokenize"),
    ("too_many_files", "resources", "no", "The limit of open files or processes was reached.",
     "ulimit -n 65536 (or ulimit -u), fewer loader workers"),
    ("file_system", "infra", "yes", "The file system failed: input/output error, stale handle or read-only.",
     "check the mount on that node; try again elsewhere"),
    ("checkpoint_damaged", "infra", "yes", "A checkpoint is truncated or corrupt.",
     "windlass ckpt verify RUN; resume from the one before"),
    ("checkpoint_mismatch", "user", "no", "The checkpoint is of another model: names or shapes differ.",
     "name the model that it was saved from, or checkpoint.resume=false"),
    # network and collectives
    ("nccl_network", "infra", "yes", "The transport between ranks failed: a connection was refused, lost or timed out.",
     "check security groups and NCCL_SOCKET_IFNAME; windlass debug RUN measures the network"),
    ("nccl_efa", "infra", "yes", "The EFA/libfabric layer under NCCL failed.",
     "match the versions of aws-ofi-nccl, libfabric and NCCL; FI_EFA_USE_HUGE_PAGE=0 if memory cannot be allocated"),
    ("nccl_slow_fallback", "infra", "no", "NCCL uses plain TCP sockets although a faster network was expected.",
     "request the interfaces (target.kubernetes.efa=N) and use an image with aws-ofi-nccl; image.efa=true"),
    ("collective_timeout", "infra", "yes", "A collective timed out: some rank hung or never came to it, and no rank"
            " said why.",
     "look at the rank that is behind (logs, stacks); longer: parallel.timeout_minutes"),
    ("collective_mismatch", "user", "no", "The ranks called different collectives, or with different shapes.",
     "make every rank take the same path: batches, branches and skipped steps must agree"),
    ("hang", "infra", "yes", "It runs, but has made no step for long.",
     "py-spy dump on every rank; then stop it and run it again from the last checkpoint"),
    ("straggler", "infra", "yes", "One rank or host is much slower than the others.",
     "take that host out (exclude it) and run again"),
    ("rendezvous", "infra", "yes", "The nodes did not all meet in time.",
     "check that every node started; longer join time-outs while images are pulled"),
    ("dns", "infra", "yes", "A host name does not resolve.",
     "check the headless service and DNS of the cluster; try again"),
    ("port_in_use", "infra", "yes", "The port is taken by another process.",
     "target.port=N with another, or target.port=null for a free one"),
    ("clock_skew", "infra", "no", "The clock of the machine is wrong.",
     "chronyc tracking; set the clock (NTP) on that host"),
    # libraries and hardware
    ("library_clash", "image", "no", "Libraries in the image do not belong together: built for other versions.",
     "windlass image test; build the extension for the installed torch and CUDA, keep one NCCL"),
    ("driver_too_old", "image", "no", "The node's GPU driver is too old (or mismatched) for the CUDA of the image.",
     "an image for the driver's CUDA (image.cuda=…), or a newer driver"),
    ("gpu_arch", "image", "no", "The libraries have no kernels for this type of GPU.",
     "a torch wheel that was built for it: image.torch / image.cuda"),
    ("gpu_hardware", "infra", "yes", "The GPU or its links failed.",
     "take the node out of the pool; nvidia-smi -q and dmesg (Xid) say more; run again elsewhere"),
    ("gpu_count", "user", "no", "More GPUs are used than the process can see.",
     "resources.gpus_per_node and resources.processes_per_node as the node has; CUDA_VISIBLE_DEVICES"),
    # hub and stores
    ("hub_gated", "access", "no", "The repository is gated or private, and the token is missing or has no access.",
     "accept the licence on its page, then export HF_TOKEN=…"),
    ("hub_rate_limit", "infra", "yes", "The hub limits requests or has trouble itself.",
     "windlass data fetch once to a shared folder; try again later"),
    ("hub_offline", "infra", "no", "The hub cannot be reached from there, and the files are not in the cache.",
     "fetch the files where there is a network, to a folder that the nodes see (HF_HOME)"),
    ("hub_missing", "user", "no", "There is no such repository, revision or file on the hub.",
     "check model.path, model.revision, data.source"),
    ("store_access", "access", "no", "The object store denies access, or the bucket does not exist.",
     "check credentials, the role of the nodes and the bucket's name"),
    ("store_transient", "infra", "yes", "The object store throttled, failed or dropped the connection.",
     "try again; fewer parallel requests"),
    # the user's code
    ("user_import", "user", "no", "A Python module cannot be imported.",
     "add it to image.pip / image.requirements, or send the code: target.kubernetes.code"),
    ("user_arguments", "user", "no", "An argument or setting is wrong.",
     "see the message; the program's --help, or windlass schema --keys"),
    ("user_code", "user", "no", "The program itself raised an error.",
     "see the traceback: the last line of your own code in it"),
    ("user_data", "user", "no", "The data is not what the program expects.",
     "windlass data inspect; data.bad_records"),
    ("device_assert", "user", "no", "A kernel's assertion failed: an index is outside its table.",
     "check token ids and labels against the vocabulary; CUDA_LAUNCH_BLOCKING=1 names the line"),
    ("illegal_memory_access", "user", "no", "A kernel accessed memory that it must not.",
     "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer names the kernel; suspect custom extensions"),
    ("segfault", "user", "no", "Native code crashed.",
     "PYTHONFAULTHANDLER=1 shows where; suspect native extensions"),
    ("nan", "training", "policy", "The loss is not a number any more, or diverged.",
     "a lower train.learning_rate, more train.warmup_steps; go on from an earlier checkpoint"),
    # the job's life
    ("preempted", "lifecycle", "yes", "It had to leave: preemption, spot reclaim, drain or maintenance.",
     "windlass run … goes on from the last checkpoint"),
    ("node_lost", "infra", "yes", "A node stopped answering.",
     "windlass run … goes on from the last checkpoint on other nodes"),
    ("time_limit", "lifecycle", "policy", "It came to its time limit.",
     "target.slurm.time=… or target.kubernetes.deadline=…; windlass run … goes on from the last checkpoint"),
    ("killed", "lifecycle", "yes", "Its processes were killed from outside: by hand, by the end of a session, by the"
            " kernel.",
     "windlass run … goes on from the last checkpoint; dmesg says whether the kernel killed them for memory"),
    ("cancelled", "lifecycle", "no", "Somebody cancelled it.",
     "windlass run … goes on from the last checkpoint"),
    ("running", "lifecycle", "wait", "Nothing is wrong: it runs or is starting.", "windlass logs RUN --follow"),
    ("succeeded", "lifecycle", "no", "It ended well.", "–"),
    ("unknown", "unknown", "no", "The facts do not say.",
     "windlass logs RUN; the first error lines are above"),
)  # fmt: skip

CLASSES = {row[0]: FailureClass(*row) for row in _TABLE}
