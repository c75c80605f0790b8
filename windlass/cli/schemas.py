"""What every command prints with `--json`. The schemas of docs/output.schema.json are made from these models.

Tests validate whatever a command prints against its model, so a key that is added to a command is added here. Keys may
be added at any time. A key that goes, another type, or a new word in a list of words raises SCHEMA_VERSION.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from windlass.spec import Run

SCHEMA_VERSION = 1

State = Literal["waiting", "running", "finished", "failed", "preempted", "stopped", "unknown"]


class Printed(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Error(Printed):
    """Why a command failed."""

    error: str
    """What happened."""
    evidence: str | None
    cause: str | None
    fix: str | None
    """The command or the change that mends it."""
    exit_code: int
    """See exit-codes.md."""


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
    task: Literal["pretrain", "chat", "lora"]
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


ProgressLine = StepLine | ValidationLine | LogLineShown | StateLine | EventLine


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
    history: list[dict[str, Any]]
    """Records of history.jsonl."""
    history_left_out: int
    """Older records that are not here."""
    pods: list[Pod] | None = None
    """Of a run on Kubernetes."""
    curve: list[tuple[int, float | None]] | None = None
    """With --curve: step and loss."""


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


class Checkpoint(Printed):
    """A checkpoint in one tier."""

    tier: str
    step: int
    path: str
    complete: bool
    """False: a save that was cut off, or is under way; it is never resumed from."""
    bytes: int
    created: float | None
    """Seconds since 1970."""
    world_size: int | None
    tokens: int | None


class ListedCheckpoint(Checkpoint):
    """A checkpoint in one tier, with its validation."""

    validation_loss: float | None
    best: bool


class Damage(Printed):
    file: str
    reason: str


class VerifiedCheckpoint(Printed):
    """A checkpoint whose files were read."""

    tier: str
    step: int
    complete: bool
    removed: bool
    """By a run that saves, while it was read."""
    damages: list[Damage]


class FetchedCheckpoint(Printed):
    """A checkpoint that is in a folder now."""

    step: int
    path: str


class Pruned(Printed):
    """Checkpoints that were deleted, or with --dry-run would be."""

    deleted: list[Checkpoint]
    expired: list[Checkpoint]
    leftovers: int
    """What saves that were cut off had left, cleared."""


class Exported(Printed):
    """A Hugging Face folder."""

    path: str
    step: int
    kind: str
    """model or adapter."""
    dtype: str
    bytes: int


class FetchedData(Printed):
    """Records of a dataset that are here now; with --shards as tokens."""

    out: str
    dataset: str
    records: int
    seconds: float
    bytes: int | None = None
    parts: int | None = None
    tokens: int | None = None
    shards: int | None = None


class TokenizedData(Printed):
    """Token shards that were made."""

    folder: str
    tokens: int
    documents: int
    shards: int
    dtype: str
    tokenizer: str
    vocab_size: int
    left_out: dict[str, int]
    """Documents that are not in them, by the reason."""
    validation: str | None
    """The folder of the validation shards."""
    seconds: float


class LengthBar(Printed):
    low: int
    high: int
    count: int


class Lengths(Printed):
    unit: Literal["tokens", "characters"]
    mean: float
    smallest: int
    median: int
    ninetieth: int
    largest: int
    histogram: list[LengthBar]


class InspectedData(Printed):
    """What shards or text files hold."""

    path: str
    kind: str
    num_documents: int
    num_tokens: int | None
    lengths: Lengths
    samples: list[str]
    facts: dict[str, int | str | None]


class UsedSource(Printed):
    """What a run takes from one of its sources."""

    source: str
    share: float
    num_sequences: int | None
    """None: a stream."""
    sequences_read: int
    epochs: float | None


class Sequence(Printed):
    """The text of a training sequence."""

    id: str
    source: str
    num_tokens: int
    num_trained: int
    documents: list[tuple[int, str]]
    """The number of each document of the source, and its text as far as it is in the sequence."""


class Conflict(Printed):
    """Something in a Dockerfile or in requirements that will fail or hurt."""

    id: str
    severity: Literal["error", "warning"]
    sentence: str
    place: str | None
    """The line of the Dockerfile."""
    cause: str | None
    """The line of a requirements file that asks for it; else the same."""
    evidence: list[str]


class CheckedImage(Printed):
    """What the resolved state of a Dockerfile shows."""

    conflicts: list[Conflict]
    patch: str
    """A diff that heals what can be healed: the patched file was resolved and judged again."""
    changes: list[str]
    """What the patch does."""
    left: list[Conflict]
    """After the patch."""
    unchecked: list[str]
    """What was not understood or could not be asked."""
    assumed: list[str]
    """What was taken for granted: of the nodes, of an index out of reach."""


class ImageNode(Printed):
    gpu: str | None
    driver: str | None
    platform: str
    efa: bool
    cpu_only: bool
    origin: str


class ImageChoice(Printed):
    what: str
    value: str
    why: str
    source: str


class ImagePlan(CheckedImage):
    """What an image should be made of."""

    node: ImageNode
    choices: list[ImageChoice]
    warnings: list[str]
    dockerfile: str
    files: dict[str, str]


class ImageCheck(Printed):
    name: str
    status: Literal["passed", "failed", "skipped"]
    detail: str
    evidence: str | None
    seconds: float | None


class ImageReport(Printed):
    """What an image shows when it is run."""

    image: str
    level: Literal["quick", "standard", "full"]
    passed: bool
    machine: str
    loaded: dict[str, str | None]
    """Versions as loaded."""
    seconds: float
    checks: list[ImageCheck]


class ImageFix(Printed):
    id: str
    sentence: str


class BuiltImage(Printed):
    """An image that was built and tested."""

    image: str
    id: str
    tag: str
    platform: str
    builder: str
    attempts: int
    fixes: list[ImageFix]
    written: list[str]
    """Files that were changed."""
    records: str
    pushed: str | None
    proof: ImageReport | None


class BuildRequest(Printed):
    """What would be built, and by which command or request to CodeBuild."""

    dockerfile: str
    builder: str
    tag: str
    command: str | None = None
    request: dict[str, Any] | None = None


class PushedImage(Printed):
    """An image in a registry."""

    image: str
    pinned: str
    """By digest."""
    digest: str
    bytes: int
    already_there: bool
    run_file: str | None
    """The run file that names it now."""


class PushRequest(Printed):
    """What would be pushed where."""

    image: str
    destination: str


class Overlay(Printed):
    """Code that was put on an image."""

    image: str
    pinned: str
    digest: str
    overlay_of: str
    files: int
    layer_bytes: int
    seconds: float
    run_file: str | None


class DoctorRow(Printed):
    name: str
    state: Literal["ok", "warning", "missing"]
    text: str
    fix: str | None


class Examination(Printed):
    """Whether this machine can train."""

    can_train: bool
    rows: list[DoctorRow]


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


@dataclass(frozen=True)
class Output:
    """What a command prints; with some options it prints something else."""

    command: str
    typed: str
    """Options and arguments with which it prints this."""
    model: Any
    note: str = ""
    each_line: bool = False
    stream: Literal["stdout", "stderr"] = "stdout"

    @property
    def name(self) -> str:
        return f"{self.command} {self.typed}".strip()

    @property
    def options(self) -> frozenset[str]:
        return frozenset(word for word in self.typed.split() if word.startswith("--"))


LINES = "one object per line"
OUTPUTS = (
    Output("init", "", InitResult),
    Output("init", "--list", list[Preset]),
    Output("plan", "", Plan),
    Output("run", "", RunResult),
    Output("run", "--dry-run", DryRun),
    Output("run", "--sweep", list[SweepRun]),
    Output("run", "--sweep --dry-run", SweepDryRun),
    Output(
        "run",
        "(progress)",
        ProgressLine,
        note=f"on stderr, {LINES}; lines that are no objects are for people",
        each_line=True,
        stream="stderr",
    ),
    Output("ls", "", list[ListedRun]),
    Output("show", "", ShownRun),
    Output("logs", "", list[LogLine]),
    Output("logs", "--follow", LogLine, note=LINES, each_line=True),
    Output("stop", "", StopResult),
    Output("why", "", WhyResult),
    Output("compare", "", Comparison),
    Output("rm", "", list[RemovedRun]),
    Output("top", "", Use),
    Output("top", "--every", Use, note=LINES, each_line=True),
    Output("debug", "", list[NetworkCheck]),
    Output("sync", "", SyncResult),
    Output("ckpt ls", "", list[ListedCheckpoint]),
    Output("ckpt verify", "", list[VerifiedCheckpoint]),
    Output("ckpt get", "", FetchedCheckpoint),
    Output("ckpt prune", "", Pruned),
    Output("ckpt export", "", Exported),
    Output("data fetch", "", FetchedData),
    Output("data tokenize", "", TokenizedData),
    Output("data inspect", "", InspectedData),
    Output("data inspect", "RUN.yaml", list[UsedSource]),
    Output("data inspect", "RUN.yaml --sequence", Sequence),
    Output("image plan", "", ImagePlan),
    Output("image plan", "with a Dockerfile", CheckedImage, note="of the run file, or --dockerfile"),
    Output("image build", "", BuiltImage),
    Output("image build", "--dry-run", BuildRequest),
    Output("image test", "", ImageReport),
    Output("image push", "", PushedImage),
    Output("image push", "--dry-run", PushRequest),
    Output("image overlay", "", Overlay),
    Output(
        "image infrastructure",
        "",
        dict[str, Any],
        note="a CloudFormation template: its form is not ours",
    ),
    Output("doctor", "", Examination),
    Output("schema", "", dict[str, Any], note="a JSON Schema"),
    Output("schema", "--keys", list[SchemaKey]),
    Output("error", "", Error, note="of every command that fails"),
)


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # "Loss" for `loss` says nothing


def schema_of(outputs: Iterable[Output]) -> dict[str, Any]:
    """The JSON Schema of some outputs, each under its name in `$defs`, and of any of them as a whole.

    Unknown keys are allowed: a newer windlass may print more.
    """
    adapters: list[tuple[str, Literal["serialization"], TypeAdapter[Any]]] = [
        (one.name, "serialization", TypeAdapter(one.model)) for one in outputs
    ]
    by_name, models = TypeAdapter.json_schemas(adapters, schema_generator=_Generator)
    each = {name: by_name[name, "serialization"] for name, _, _ in adapters}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What windlass prints with --json",
        "schema_version": SCHEMA_VERSION,
        "anyOf": [{"$ref": f"#/$defs/{quote(name)}"} for name in each],
        "$defs": {**each, **models.get("$defs", {})},
    }
    opened: dict[str, Any] = _without_closed_objects(schema)
    return opened


def _without_closed_objects(schema: Any) -> Any:
    if isinstance(schema, dict):
        kept = {key: one for key, one in schema.items() if key != "additionalProperties" or one is not False}
        return {key: _without_closed_objects(one) for key, one in kept.items()}
    return [_without_closed_objects(one) for one in schema] if isinstance(schema, list) else schema
