"""The `target` section of the run file: where a run goes, and what Slurm and Kubernetes are asked for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from windlass.spec.section import Section, SettingError

SLURM_TIME = re.compile(
    r"[0-9]{1,9}(min|h|d)|[0-9]{1,9}(:[0-9]{1,2}){1,2}|[0-9]{1,9}-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE"
)
DURATION = re.compile(r"(\d+)(s|min|h|d)")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
DEVICE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?")
STORAGE = re.compile(r"none|pvc:[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/]+)*|hostpath:/.+")
SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(=(file:.+|secret:[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._A-Za-z0-9]+))?")


class SlurmOptions(Section):
    """What Slurm is asked for, beside nodes and GPUs."""

    partition: str | None = None
    """Partition. Default: the cluster's own default."""
    account: str | None = None
    """Account that pays."""
    qos: str | None = None
    """Quality of service."""
    time: str | None = None
    """Time limit of one stay on the nodes: `90min`, `4h`, `2d`, or as Slurm writes it, in quotes: `"1-12:00:00"`. A run
    that needs longer is saved before the limit and goes on by itself. Default: the partition's."""
    constraint: str | None = None
    """Features the nodes must have."""
    exclusive: bool = False
    """Share the nodes with nobody: all their cores and memory."""
    gres: str | None = None
    """Generic resources per node where the cluster wants them by name, `gpu:h100:8` say, not a number of GPUs."""
    memory: str | None = None
    """Memory per node, `200G` say. Default: the cluster's; all of it with `exclusive`."""
    job_name: str | None = None
    """Name of the job in Slurm's lists. Default: the run's name."""
    requeue: bool = True
    """Go back to the queue and on from the last checkpoint after preemption, the time limit and lost nodes."""
    environment: str | None = None
    """Python environment with windlass in it, a folder that every node sees. Default: the one `windlass` runs in."""
    setup: tuple[str, ...] = ()
    """Shell lines that the job runs first, such as `module load cuda`."""
    container: str | None = None
    """Image in which the ranks run, through Pyxis and enroot: `nvcr.io#nvidia/pytorch:…` or a `.sqsh` file."""
    container_mounts: tuple[str, ...] = ()
    """Folders to mount into the container, `/data:/data` say; the run folder always is."""
    sbatch: tuple[str, ...] = ()
    """Further sbatch options as they are, `--reservation=maintenance` say."""

    @field_validator("time", mode="before")
    @classmethod
    def time_is_text(cls, value: Any) -> Any:
        if isinstance(value, int):  # YAML reads 4:00:00 as a number to the base of 60, which nobody means
            raise ValueError("target.slurm.time needs a unit, 90min or 4h, or quotes inside it: '\"4:00:00\"'")
        return value

    @model_validator(mode="after")
    def one_line_each(self) -> Self:
        if self.time is not None and not SLURM_TIME.fullmatch(self.time):
            raise ValueError(
                f"target.slurm.time {self.time!r} is no time limit; for example 90min, 4h, 2d, '1-12:00:00'"
            )
        for name, value in self:
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and any(ord(letter) < 32 for letter in text):
                    raise ValueError(f"target.slurm.{name} holds a line break or another control character")
        wrong = [line for line in self.sbatch if not line.startswith("-")]
        if wrong:
            raise ValueError(f"target.slurm.sbatch takes sbatch options, and {wrong[0]!r} does not begin with a dash")
        return self


class KubernetesOptions(Section):
    """What Kubernetes is asked for, beside nodes and GPUs."""

    context: str | None = None
    """Context of your kubeconfig. Default: the current one. `--on kubernetes:NAME` sets it."""
    namespace: str | None = None
    """Namespace. Default: the context's."""
    job: Literal["trainjob", "pytorchjob", "hyperpod", "job"] | None = None
    """Kind of job. Default: the first of these that the cluster serves; a plain indexed Job always works."""
    runtime: str | None = None
    """An existing ClusterTrainingRuntime for a `trainjob`. Default: a TrainingRuntime of the run's own."""
    image: str | None = None
    """Image that the pods run. Default: image.name."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When nodes pull the image. Default: Kubernetes' own rule."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets with registry logins, by name."""
    python: str = "python3"
    """Python of the image that has torch and, unless `carry_windlass` is set, windlass."""
    code: str | None = None
    """Folder with your own Python code, sent with the job and put first on PYTHONPATH; `windlass sync` sends it again
    without a new image. Refused: secrets in it, and links that lead out of it. Hidden files stay here."""
    carry_windlass: bool = False
    """Send windlass itself with the job too, for images that have torch and transformers alone."""
    storage: str = "none"
    """Where run folders are: `pvc:CLAIM` or `pvc:CLAIM/FOLDER` (FSx, EFS, any ReadWriteMany claim) · `hostpath:/FOLDER`
    (a file system that every node mounts there) · `none`: the pod's own disk, lost with it."""
    min_nodes: PositiveInt | None = None
    """Train on fewer nodes than resources.nodes, down to this many, while some are missing. Default: wait for all."""
    secrets: tuple[str, ...] = ()
    """Variables that pods get from a Secret: `HF_TOKEN` (its value from your environment), `HF_TOKEN=file:PATH`, or
    `HF_TOKEN=secret:NAME/KEY`, a Secret that is there already. Values are in no manifest."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further variables of every pod, for all to read: secrets go into `secrets`."""
    cpu: str | None = None
    """CPUs per pod, `8` or `500m`. Default: with GPUs nearly all that the node has; else threads × processes."""
    memory: str | None = None
    """Memory per pod, `64Gi` say. Default: with GPUs nearly all that the node has; else no request."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the nodes call a GPU: `amd.com/gpu`, or a part of one, such as `nvidia.com/mig-3g.40gb`."""
    devices: dict[str, PositiveInt] = Field(default_factory=dict)
    """Further devices of every pod, by the names that nodes offer them under: `{rdma/hca_shared: 1}`."""
    efa: NonNegativeInt | None = None
    """EFA interfaces per pod. Default: what the instance or the nodes have, where whole GPU nodes are used."""
    shm: str | None = None
    """Size of /dev/shm, held in memory. Default: half of the pod's memory."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Further labels of the pods, for cost reports or network policies."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Further annotations of the pods."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that nodes must have; resources.instance adds the instance type's."""
    exclude_nodes: tuple[str, ...] = ()
    """Nodes to keep away from, by name. `windlass run` adds those that it found to be faulty."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Taints that pods tolerate, beside those of GPU nodes."""
    spread: Literal["hosts", "none"] | None = None
    """`hosts`: no two pods of the run on one node. Default: that, where pods take whole GPU nodes."""
    same_zone: bool | None = None
    """All pods in one availability zone. Default: on EFA, which does not cross zones."""
    required_topology: str | None = None
    """Label of nodes within one value of which all pods must be, `topology.k8s.aws/network-node-layer-3` say: asked of
    Kueue where the run has a `queue`, else of the scheduler."""
    preferred_topology: str | None = None
    """The same, where there is room."""
    queue: str | None = None
    """Kueue LocalQueue."""
    queue_priority: str | None = None
    """Kueue WorkloadPriorityClass."""
    priority_class: str | None = None
    """PriorityClass of the pods."""
    gang: Literal["auto", "none", "coscheduling", "volcano"] = "auto"
    """Start all pods together or none, as a `trainjob` or `pytorchjob`. `auto`: with what the cluster has, unless Kueue
    admits the job as a whole. A `job` or `hyperpod` has no gang: Kueue (`queue`) does it for them."""
    scheduler: str | None = None
    """Scheduler of the pods, by name. Default: the cluster's; Volcano's, or coscheduling's, where `gang` names it."""
    service_account: str | None = None
    """ServiceAccount of the pods, for access to S3 say."""
    deadline: str | None = None
    """The job is ended when it has run this long: `90min`, `4h`, `2d`."""
    keep_for: str | None = None
    """The job and its pods are deleted so long after the end: `1h`, `7d`. Default: they stay until `windlass stop`."""
    spares: NonNegativeInt = 0
    """Pods of a `hyperpod` job beside those of resources.nodes, ready to take a lost one's place. They are paid for."""
    max_pod_failures: NonNegativeInt | None = None
    """Failed pods that are replaced before a `job` or `trainjob` fails. Default: target.max_restarts for every node.
    Pods that had to leave (a drain, a preemption, a lost node) do not count."""
    node_lost_seconds: NonNegativeInt = 30
    """Seconds after which pods are taken from a node that Kubernetes finds unreachable or not ready (it needs 40 to 50
    to find it). Kubernetes' own default is 300."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Pod spec to merge into the pods': mappings key by key; containers, volumes and other lists of named things by
    name, where `trainer` is the container of the ranks; other lists and values replace what is there."""

    @model_validator(mode="after")
    def texts_are_well_formed(self) -> Self:
        for name, example in (("deadline", "4h"), ("keep_for", "7d")):
            value = getattr(self, name)
            if value is not None and not DURATION.fullmatch(value):
                raise ValueError(f"target.kubernetes.{name} {value!r} is no duration; for example {example}, 90min")
        for name in ("cpu", "memory", "shm"):
            value = getattr(self, name)
            if value is not None and not QUANTITY.fullmatch(value):
                raise ValueError(f"target.kubernetes.{name} {value!r} is no quantity; for example 8, 500m or 64Gi")
        for name in (self.gpu_resource, *self.devices):
            if not DEVICE.fullmatch(name):
                raise ValueError(
                    f"target.kubernetes: {name!r} is no device; for example amd.com/gpu or rdma/hca_shared"
                )
        if not STORAGE.fullmatch(self.storage):
            raise ValueError(
                f"target.kubernetes.storage {self.storage!r} is not understood; for example pvc:my-claim, "
                "pvc:my-claim/folder, hostpath:/folder or none; a claim's name is in small letters"
            )
        if ".." in self.storage.split("/"):
            raise ValueError(f"target.kubernetes.storage {self.storage!r} leads out of its claim")
        return self

    @model_validator(mode="after")
    def secrets_are_named(self) -> Self:
        for secret in self.secrets:
            if not SECRET.fullmatch(secret):
                shown = secret.split("=")[0]  # what follows may be the secret itself
                raise ValueError(
                    f"target.kubernetes.secrets: {shown!r} must be a variable's NAME, NAME=file:PATH or "
                    "NAME=secret:SECRET/KEY; a value itself never belongs into a run file"
                )
        names = [secret.split("=")[0] for secret in self.secrets]
        twice = next((name for name in names if names.count(name) > 1 or name in self.environment), None)
        if twice:
            raise ValueError(f"target.kubernetes gives the variable {twice} twice")
        return self

    @model_validator(mode="after")
    def runtime_is_a_trainjobs(self) -> Self:
        if self.runtime and self.job not in (None, "trainjob"):
            raise SettingError(
                f"target.kubernetes.runtime belongs to a trainjob, but target.kubernetes.job is {self.job}",
                "target.kubernetes.job",
                "trainjob",
                "    or target.kubernetes.runtime=null",
            )
        return self


class TargetSection(Section):
    """Where the run goes."""

    kind: Literal["local", "slurm", "kubernetes"] = "local"
    """`local`: this machine · `slurm`: a Slurm cluster, from here or over SSH · `kubernetes`: a cluster of your
    kubeconfig."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Rendezvous port. Default: a free one; 29400 on Kubernetes, in the first pod."""
    host: Annotated[str, Field(pattern=r"^[^\s-]\S*$")] | None = None
    """Login node to submit to Slurm from over SSH, by its name in your own ssh configuration. The run folder must be at
    the same path there. Default: Slurm's commands are called here. `--on slurm:NAME` sets it."""
    max_restarts: NonNegativeInt = 3
    """How often a rank's death (a signal, a lost peer) is answered by a restart from the last checkpoint. Errors that
    would come again are not retried."""
    slurm: SlurmOptions = SlurmOptions()
    """Options of the Slurm target."""
    kubernetes: KubernetesOptions = KubernetesOptions()
    """Options of the Kubernetes target."""

    @model_validator(mode="after")
    def only_slurm_has_a_host(self) -> Self:
        if self.host and self.kind != "slurm":
            raise SettingError(
                f"target.host is a Slurm login node, but target.kind is {self.kind}",
                "target.kind",
                "slurm",
                "    or target.host=null",
            )
        return self


def seconds(duration: str) -> int:
    """A duration of the run file in seconds."""
    number, unit = DURATION.fullmatch(duration).groups()  # type: ignore[union-attr]  # checked when it was read
    return int(number) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[unit]
