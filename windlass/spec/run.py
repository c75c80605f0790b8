"""The typed run file: one small frozen model per section, each checking itself."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
SLURM_TIME = re.compile(r"\d+(min|h|d)|\d+(:\d{1,2}){1,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE")


class Section(BaseModel):
    """A part of the run file: frozen, unknown keys forbidden, every field described for the reference page."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model is trained, and what its weights are at step 0."""

    preset: str | None = None
    """Name of a published or tiny configuration (`windlass init --list`), for example `llama3.2-1b`."""
    path: str | None = None
    """A transformers causal language model instead: hub id or local folder."""
    revision: str | None = None
    """Branch, tag or commit of the hub id."""
    init: Literal["random", "pretrained"] = "random"
    """`random` draws fresh weights from the seed; `pretrained` loads the model's own safetensors."""
    config: dict[str, Any] = {}
    """Fields of the transformers configuration to change, for example `{num_hidden_layers: 8}`."""
    attention: Literal["sdpa", "eager", "flex_attention"] = "sdpa"
    """Attention implementation, by its transformers name."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off unless asked by name."""

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if (self.preset is None) == (self.path is None):
            raise ValueError("give either model.preset or model.path, and not both")
        return self


class DataSection(Section):
    """What is read, and how it becomes sequences."""

    source: str = "hf:allenai/c4"
    """`corpus:austen` (shipped) · a folder of token shards (`windlass data tokenize`) · JSONL, text or parquet files
    (a path or a glob; tokenized once into a cache) · `hf:NAME` (a `datasets` source, streamed)."""
    config: str | None = None
    """Configuration of a `hf:` source; `en` for allenai/c4."""
    split: str = "train"
    """Split of a `hf:` source."""
    files: tuple[str, ...] = ()
    """Data files of a `hf:json`, `hf:text` or `hf:parquet` source: paths or URLs."""
    text_field: str = "text"
    """Field of a record that holds the text."""
    tokenizer: str | None = None
    """Hub id or folder of a tokenizer, or `tiny` (shipped). Default: the model's own; `tiny` for the tiny presets."""
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens per training sequence. Default: 2048, or the model's maximum where that is shorter."""
    document_mask: bool = False
    """Keep packed documents apart: attention and loss stop at document ends, positions restart there."""
    shuffle: bool = True
    """Visit the sequences in a random order drawn from train.seed; a new one every epoch."""
    validation_source: str | None = None
    """Where validation sequences come from; same forms as `source`."""
    validation_split: str = "validation"
    """Split of a `hf:` validation source."""
    holdout: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """Share of the sequences kept out of training and used for validation (not for `hf:` sources)."""

    @model_validator(mode="after")
    def one_validation_set(self) -> Self:
        if self.validation_source and self.holdout:
            raise ValueError("give either data.validation_source or data.holdout, and not both")
        return self


class TrainSection(Section):
    """How long, how fast and with which numbers."""

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""
    global_batch: PositiveInt = 32
    """Sequences per optimizer step over all ranks; the same on any number of ranks."""
    micro_batch: PositiveInt | None = None
    """Sequences a rank takes through the model at once; the rest is accumulated. Default: its share, at most 8."""
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    min_learning_rate: NonNegativeFloat | None = None
    """Learning rate at the last step of a decaying schedule. Default: a tenth of the peak."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up; `wsd` is constant and then decays linearly over the last `decay_fraction`."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up. Default: a fiftieth of all steps."""
    decay_fraction: Fraction = 0.1
    """Share of the steps in which the `wsd` schedule decays."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW weight decay, on matrices only: not on norms and biases."""
    beta1: Fraction = 0.9
    """AdamW's first-moment decay."""
    beta2: Fraction = 0.95
    """AdamW's second-moment decay."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's denominator term."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 leaves gradients as they are (the norm is still reported)."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Compute type; master weights, gradients' sums and optimizer state stay fp32."""
    seed: NonNegativeInt = 0
    """Draws weights, data order and dropout."""
    compile: bool | None = None
    """Compile each block with torch.compile. Default: on GPUs only."""
    fp8: bool = False
    """Compute the blocks' large matrix products in fp8, one scale per tensor: faster from Hopper on, less exact."""
    fused_head: bool | None = None
    """Compute head and loss together, a block of logits at a time. Default: on GPUs, for families with a plain head."""
    bf16_weights: bool | None = None
    """Hold the weights in bf16 for computing, with fp32 masters in the optimizer alone; the same numbers, fewer copies.
    One rank and bf16 only, where it is the default."""
    log_every: PositiveInt = 10
    """Steps between log lines. metrics.jsonl has every step whatever this is."""
    validate_every: PositiveInt | None = None
    """Steps between validations; one more at the end. Default: at the end only, if there is validation data."""
    validation_sequences: PositiveInt = 64
    """Sequences per validation, the same ones each time."""
    tensorboard: bool = False
    """Also write TensorBoard event files (needs the `tensorboard` extra)."""

    @model_validator(mode="after")
    def schedule_fits(self) -> Self:
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"train.warmup_steps is {self.warmup_steps} but the run has only {self.steps} steps")
        if self.min_learning_rate is not None and self.min_learning_rate > self.learning_rate:
            raise ValueError(f"train.min_learning_rate {self.min_learning_rate} is above the peak {self.learning_rate}")
        return self


class ParallelSection(Section):
    """How the model is spread over ranks."""

    sharding: Literal["auto", "full", "hybrid", "ddp", "none"] = "auto"
    """`full`: FSDP2 over all ranks · `hybrid`: FSDP2 inside groups, copies across them · `ddp`: a whole copy per rank ·
    `none`: one rank only. `auto`: `none` for one rank, else `full`."""
    shard_group: PositiveInt | None = None
    """Ranks per group of `hybrid`. Default: the ranks of one node."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses (FSDP2 only)."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: `full` keeps block inputs only, `selective` keeps matrix products
    and attention outputs."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters between forward and backward: less memory, more communication."""
    timeout_minutes: PositiveFloat = 10.0
    """A collective that takes longer than this ends the run with an error that names the waiting rank."""


class CheckpointSection(Section):
    """When state is saved, and what is kept."""

    every: PositiveInt = 500
    """Steps between checkpoints; one more at the end and on SIGTERM."""
    keep: PositiveInt = 3
    """Newest complete checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this, for ever."""
    at_end: bool = True
    """Save after the last step too. On SIGTERM a run saves whatever this is."""
    background: bool = True
    """Write while training goes on; only the copy to host memory stalls it."""
    resume: bool = True
    """Start from the newest complete checkpoint of the run folder."""
    grace_seconds: PositiveInt = 120
    """Time between SIGTERM and SIGKILL; a save must fit in."""
    export: bool = False
    """Write `export/`, a Hugging Face folder, when the run is finished."""

    @model_validator(mode="after")
    def export_needs_the_end(self) -> Self:
        if self.export and not self.at_end:
            raise ValueError("checkpoint.export needs the last step's checkpoint, but checkpoint.at_end is false")
        return self


class ResourcesSection(Section):
    """What every node of the run gets."""

    nodes: PositiveInt = 1
    """Number of machines."""
    instance: str | None = None
    """Instance type of the nodes, such as `p5.48xlarge`: `windlass plan` takes GPUs, network and price from it."""
    gpus_per_node: NonNegativeInt | None = None
    """GPUs per node. Default: all there are; 0 trains on the CPU."""
    processes_per_node: PositiveInt | None = None
    """Ranks per node when training on the CPU. Default: 1. On GPUs it is one rank per GPU."""
    threads_per_process: PositiveInt | None = None
    """CPU threads per rank. Default: the machine's cores divided by its ranks."""

    @model_validator(mode="after")
    def one_rank_per_gpu(self) -> Self:
        if self.gpus_per_node and self.processes_per_node not in (None, self.gpus_per_node):
            raise ValueError(
                f"resources.processes_per_node is {self.processes_per_node} but there is one rank per GPU, "
                f"and gpus_per_node is {self.gpus_per_node}"
            )
        return self


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


class TargetSection(Section):
    """Where the run goes."""

    kind: Literal["local", "slurm"] = "local"
    """`local`: this machine · `slurm`: a Slurm cluster, from here or over SSH."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Rendezvous port. Default: a free one."""
    host: Annotated[str, Field(pattern=r"^[^\s-]\S*$")] | None = None
    """Login node to submit to Slurm from over SSH, by its name in your own ssh configuration. The run folder must be at
    the same path there. Default: Slurm's commands are called here."""
    max_restarts: NonNegativeInt = 3
    """How often a rank's death (a signal, a lost peer) is answered by a restart from the last checkpoint. Errors that
    would come again are not retried."""
    slurm: SlurmOptions = SlurmOptions()
    """Options of the Slurm target."""

    @model_validator(mode="after")
    def only_slurm_has_a_host(self) -> Self:
        if self.host and self.kind != "slurm":
            raise ValueError(f"target.host is a Slurm login node, but target.kind is {self.kind}")
        return self


class Run(Section):
    """A run file."""

    name: str = ""
    """Name of the run and of its folder under `runs/`. Default: the file's name."""
    model: ModelSection
    data: DataSection
    train: TrainSection = TrainSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resources: ResourcesSection = ResourcesSection()
    target: TargetSection = TargetSection()

    @model_validator(mode="after")
    def name_is_a_folder(self) -> Self:
        if self.name and not RUN_NAME.fullmatch(self.name):
            raise ValueError(
                f"name {self.name!r} is not usable: at most 63 letters, digits, '.', '_' or '-', "
                "starting with a letter or digit"
            )
        return self
