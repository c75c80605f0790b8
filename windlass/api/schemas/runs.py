"""What commands on runs and their pods print, from init and plan to show, why and top; doctor and schema too."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from windlass.api.schemas import Error, Printed, State
from windlass.spec import Run


class Status(Printed):
    """Where a run stands. Everything but the state may be unknown."""

    state: State
    step: int | None
    steps: int | None
    """Of the whole run."""
    attempt: int | None
    loss: float | None
    tokens_per_s: float | None
    eta: float | None
    """Seconds left."""
    reason: str | None
    """Why it is in this state."""
    exit_code: int | None


class Summary(Printed):
    """What a run came to."""

    steps: int
    loss: float | None
    learning_rate: float | None
    validation_loss: float | None
    tokens: int | None
    tokens_per_s: float | None
    """The median of the newest steps."""
    restarts: int
    steps_repeated: int
    seconds_lost: float
    """By restarts."""
    exported: str | None
    """The folder of the last export."""


class InitResult(Printed):
    """A run file that was written."""

    path: str
    task: Literal["pretrain", "chat", "lora", "dpo"]
    model: dict[str, Any]
    """The section `model` of the run file."""
    data: str
    """data.source."""


class Preset(Printed):
    """A model preset."""

    name: str
    hub_id: str | None
    parameters: int | None


class PlannedHardware(Printed):
    gpu: str
    instance: str | None
    nodes: int
    gpus_per_node: int


class PlannedMemory(Printed):
    peak_gib: float
    gpu_gib: float
    share: float
    """Of the GPU's memory, at the peak."""
    fullest_at: str
    items_gib: dict[str, float]
    host_gib_per_node: float


class PlannedSpeed(Printed):
    launch_bound: bool
    """The host, which launches kernels, is the limit: the other numbers say little."""
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    parts_s: dict[str, float]


class PlannedGoodput(Printed):
    """What failures will cost, if they come as often as others saw them (docs/goodput.md)."""

    hours_between_failures: float
    failures: float
    """To expect in the whole run."""
    goodput: float
    """With the settings as they are: the share of time that trains."""
    losses: dict[str, float]
    """Shares: saving, repeated, detection, restart."""
    proposed: dict[str, int]
    """Keys of the section `checkpoint`: steps between saves."""
    proposed_goodput: float


class Plan(Printed):
    """What a run will need and cost. Without an estimate (`unknown` says why) the keys that may be left out are."""

    name: str
    ranks: int
    unknown: str | None
    """Why there is no estimate."""
    resolved: Run
    """The run with everything filled in."""
    warnings: list[str]
    hardware: PlannedHardware | None = None
    sharding: str | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    memory: PlannedMemory | None = None
    speed: PlannedSpeed | None = None
    hours: float | None = None
    checkpoint_stall_s: float | None = None
    validation_s: float | None = None
    usd: float | None = None
    spot_usd: float | None = None
    usd_per_node_hour: float | None = None
    price_region: str | None = None
    price_date: str | None = None
    goodput: PlannedGoodput | None = None
    assumptions: list[str] | None = None


class RunResult(Status):
    """A run that has ended, or with --detach has begun."""

    name: str
    folder: str
    warnings: list[str]
    """What was said before the start."""
    summary: Summary
    error: Error | None = None
    """Of a run that failed."""


class LocalRequest(Printed):
    """A command of this machine."""

    target: Literal["local"]
    argv: list[str]
    environment: dict[str, str]
    working_directory: str
    folder: str
    max_restarts: int
    grace_seconds: int


class SlurmRequest(Printed):
    """What goes to sbatch."""

    target: Literal["slurm"]
    argv: list[str]
    host: str | None
    """The login node."""
    script: str
    folders: list[str]


class KubernetesRequest(Printed):
    """What is created in a cluster."""

    target: Literal["kubernetes"]
    context: str | None
    namespace: str
    kind: str
    digest: str
    secrets: list[str]
    """Names of values that are sent and not shown."""
    objects: list[dict[str, Any]]
    """Manifests."""


Request = LocalRequest | SlurmRequest | KubernetesRequest


class DryRun(Printed):
    """What would be sent."""

    run: Run
    request: Request
    warnings: list[str]


class SweepRun(Printed):
    """A run of a sweep."""

    name: str
    settings: list[str]
    folder: str
    submitted: bool
    """False: it is finished or under way."""


class SweepDryRun(Printed):
    """What would be sent of a sweep."""

    runs: list[Run]
    requests: list[SlurmRequest]


class SweepResult(Status):
    """A run of a sweep, and how it ended. One that was not started waits."""

    name: str
    settings: list[str]
    """In which it differs from the others."""
    folder: str
    validation_loss: float | None


class PageAddress(Printed):
    """Where the page can be opened."""

    url: str
    """With the token, where one is needed."""
    runs: str
    """The folder whose runs it shows."""
    token: str | None


class WrittenFile(Printed):
    """A picture or a page that was written."""

    path: str
    runs: list[str]
    bytes: int


class Pod(Printed):
    """A pod of a run."""

    name: str
    phase: str
    reason: str
    message: str
    age: float
    """Seconds."""
    node: str
    restarts: int
    ranks: list[int]


class StepLine(Printed):
    """An optimizer step: a record of metrics.jsonl (metrics.md). A number that is not finite is null."""

    kind: Literal["step"]
    step: int
    steps: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    tokens: int
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    step_s: float
    data_s: float
    checkpoint_s: float
    memory_gib: float
    epoch: float
    attempt: int
    time: float
    """Seconds since 1970."""
    seconds_left: float | None


class ValidationLine(Printed):
    """A validation: a record of metrics.jsonl."""

    kind: Literal["validation"]
    step: int
    loss: float | None
    sequences: int
    tokens: int
    perplexity: float | None
    accuracy: float | None
    attempt: int
    time: float
    text: str


class LogLineShown(Printed):
    """A warning or an error that a rank has logged."""

    kind: Literal["log"]
    rank: str
    line: str
    text: str


class ErrorLine(Printed):
    """The error that a rank of a run on a cluster failed with, before the job has ended."""

    kind: Literal["error"]
    rank: int | None
    text: str
    """With its traceback."""


class EventLine(BaseModel):
    """A record of history.jsonl, with a sentence for people. Its other keys depend on the event."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    kind: str
    """`event`, unless the record has a kind of its own."""
    event: str
    text: str


class StateLine(Printed):
    """A run on a cluster waits, or is hindered."""

    kind: Literal["waiting", "running"]
    reason: str | None
    text: str
    pods: list[Pod] | None = None


ProgressLine = StepLine | ValidationLine | LogLineShown | ErrorLine | StateLine | EventLine


class ListedRun(Printed):
    """A run. One that cannot be read has the state unknown, and no numbers."""

    name: str
    target: str
    state: State
    started: float | None
    """Seconds since 1970."""
    reason: str | None = None
    step: int | None = None
    steps: int | None = None
    attempt: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    eta: float | None = None
    """Seconds left."""
    exit_code: int | None = None


class NotifyResult(Printed):
    """What was sent."""

    name: str
    state: State | None
    """In which the run ended; null for a test."""
    sent: list[str]
    failed: list[str]
    """With the reason."""


class AttemptGoodput(Printed):
    """Where the time of an attempt went."""

    attempt: int
    seconds: float
    goodput: float | None
    parts_s: dict[str, float]


class RunGoodput(Printed):
    """Where the time of a run went: its parts add up to its seconds."""

    seconds: float
    """From its first record to its last, or to now, without the time between an end and a new start by hand."""
    goodput: float | None
    """The share of training."""
    parts_s: dict[str, float]
    """training, and what else: queue, start-up, compile, validation, saving, straggler, repeated, detection, hang,
    restart, finishing, other. docs/goodput.md says what each is."""
    attempts: list[AttemptGoodput]


class RankTimes(Printed):
    """Of a rank, mean of the steps since the comparison before."""

    rank: int
    host: str
    step_s: float
    data_s: float
    """Waiting for data."""
    behind_s: float
    """By which the rank came later to its collectives than the usual one, in a step."""
    slow_since: float | None
    """Seconds since 1970, of a rank that is slow now."""
    slow_since_step: int | None


class RanksCompared(Printed):
    step: int
    steps: int
    """That were compared."""
    slow: list[int]
    ranks: list[RankTimes]


class TaskResult(Printed):
    """One metric of one task, or of a group of tasks."""

    task: str
    metric: str
    filter: str | None
    """How answers were extracted, where the task has several ways."""
    value: float | None
    """Null: not a finite number."""
    stderr: float | None
    higher_is_better: bool | None
    shots: int | None
    samples: int | None


class EvaluatedTask(TaskResult):
    """What `windlass eval` measured of a run."""

    step: int | None
    """Of the checkpoint."""
    time: float
    """When it was done, in seconds since 1970."""
    limit: int | None
    """Of examples per task; null: all."""


class ShownRun(Status):
    """Where a run stands, and how it came there."""

    name: str
    folder: str
    model: str | None
    """Its preset or its path."""
    started: float | None
    """Seconds since 1970."""
    seconds: float | None
    """From the first start to the last end, or to now."""
    summary: Summary
    evaluations: list[EvaluatedTask]
    """Results of `windlass eval`; of a task that a step was measured on twice the newest."""
    history: list[dict[str, Any]]
    """Records of history.jsonl."""
    history_left_out: int
    """Older records that are not here."""
    pods: list[Pod] | None = None
    """Of a run on Kubernetes."""
    curve: list[tuple[int, float | None]] | None = None
    """With --curve: step and loss."""
    goodput: RunGoodput
    ranks: RanksCompared | None = None
    """With --ranks: null where nothing was compared yet."""


class LogLine(Printed):
    """A line of a rank, or of the launcher or the supervisor."""

    rank: int | None
    text: str
    source: str | None = None
    """Who said it, where no rank did."""


class StopResult(Status):
    """Where a run stands after `stop`."""

    name: str
    was: State
    """Its state before."""


class ComparedRun(Printed):
    name: str
    settings: dict[str, Any]
    """By key of the run file, where the runs differ."""
    summary: Summary
    loss_at_common_step: float | None


class Comparison(Printed):
    """Runs side by side."""

    common_step: int
    """The last step that all of them have."""
    runs: list[ComparedRun]


class Generated(Printed):
    """What a model said."""

    name: str
    step: int | None
    """Of the checkpoint; null: of a folder."""
    prompt: str
    text: str
    tokens: int
    seconds: float


class Evaluation(Printed):
    """What a model reached on benchmark tasks."""

    name: str
    step: int | None
    """Of the checkpoint; null: of a folder that no run is known of."""
    time: float
    """When it was done, in seconds since 1970."""
    seconds: float
    harness: str
    """lm-eval and its version."""
    dtype: str
    limit: int | None
    """Of examples per task; null: all."""
    results: list[TaskResult]
    path: str | None
    """evaluations.jsonl of the run folder, where this was added."""


class RemovedRun(Printed):
    """A run that was deleted."""

    name: str
    folder: str
    checkpoints: int
    bytes: int
    store: str | None
    """checkpoint.store, where its copies stay."""


class Gpu(Printed):
    index: int | None
    busy: int | None
    """Percent."""
    memory_mib: int | None
    memory_total_mib: int | None
    celsius: int | None


class PodUse(Printed):
    """What a pod uses; one that does not answer has an error instead."""

    pod: str
    node: str
    node_rank: int | None
    tokens_per_s: float | None
    memory: int | None = None
    """Bytes."""
    memory_limit: int | None = None
    cpus: float | None = None
    gpus: list[Gpu] | None = None
    error: str | None = None


class Use(Printed):
    """What the pods of a run use now."""

    name: str
    step: int | None
    steps: int | None
    tokens_per_s: float | None
    pods: list[PodUse]


class NetworkCheck(Printed):
    """Something that was tried between pods."""

    check: str
    """name, port or bandwidth."""
    origin: str
    destination: str
    ok: bool
    said: str
    gbit_s: float | None


class SyncResult(Printed):
    """Code that was sent to pods."""

    name: str
    changed: bool
    """False: they had it already."""
    said: list[str]


class DoctorRow(Printed):
    name: str
    state: Literal["ok", "warning", "missing"]
    text: str
    fix: str | None


class Examination(Printed):
    """Whether this machine can train."""

    can_train: bool
    rows: list[DoctorRow]


class InstalledSkills(Printed):
    """Skills and slash commands that were written."""

    project: str
    files: list[str]


class SchemaKey(Printed):
    """A key of the run file."""

    key: str
    type: str
    default: Any
    required: bool
    description: str


class WhyEvidence(Printed):
    """A line or a record that a verdict rests on."""

    source: str
    """A log, an event, the state of a container, Slurm's accounting …"""
    rank: int | None
    host: str | None
    time: str | None
    line: str


class WhyCandidate(Printed):
    """Another class that the facts speak for."""

    model_config = ConfigDict(populate_by_name=True)
    name: str = Field(alias="class")
    confidence: float


class WhyResult(Printed):
    """Why a job failed or waits (why.md has the classes)."""

    model_config = ConfigDict(populate_by_name=True)
    name: str = Field(alias="class")
    kind: str
    confidence: float
    """Between 0 and 1; below 0.5 it is a guess."""
    cause: str
    why: str
    """How sure that is, and why."""
    evidence: list[WhyEvidence]
    retry: Literal["yes", "no", "wait", "policy"]
    fix: str
    candidates: list[WhyCandidate]
    notes: list[str]
    """What could not be asked."""
    saved: str = ""
    """The bundle that was written."""
