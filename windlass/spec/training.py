"""The sections that say what is trained and how: `model`, `train`, `parallel`, `resources`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, create_model, model_validator

from windlass.spec.section import Fraction, ImportPath, Section, SettingError


class LoraSection(Section):
    """Train small matrices beside the model's frozen weights instead of the weights themselves."""

    rank: PositiveInt | None = None
    """Inner width of the added matrices. Default: 16, or that of `adapter`."""
    alpha: PositiveFloat | None = None
    """Their product is scaled by alpha / rank. Default: twice the rank, or that of `adapter`."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of a layer's inputs that the added matrices do not see in a training step."""
    targets: tuple[str, ...] | None = None
    """Linear layers by name pattern: `q_proj`, `self_attn.*`, `layers.3.mlp.up_proj`. Default: all of the blocks
    (attention and feed-forward projections), or those of `adapter`."""
    rank_stabilised: bool | None = None
    """Scale by alpha / sqrt(rank) instead: larger ranks then learn as fast as small ones. Default: no."""
    adapter: str | None = None
    """Begin with this adapter instead of new matrices: a folder or hub id in the format of `peft`."""
    quantize: Literal["nf4"] | None = None
    """Hold the frozen weights of the targets in 4 bits (QLoRA); every rank holds all of them."""


class EarlyStoppingSection(Section):
    """End a run whose validation loss no longer falls."""

    patience: PositiveInt = 3
    """Validations in a row without a new best before the run ends."""
    min_delta: NonNegativeFloat = 0.0
    """By how much a validation loss must be below the best one to count as a new best."""


class ProfileSection(Section):
    """Record some steps with torch's profiler, into the folder `profile` of the run."""

    first: Annotated[int, Field(ge=2)] = 10
    """The first step that is recorded; not the run's first, which compiles."""
    steps: PositiveInt = 3
    """How many."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Which ranks record."""
    memory: bool = True
    """Also a snapshot of the GPU's memory, for pytorch.org/memory_viz."""
    stacks: bool = False
    """Also the lines of Python that each operation comes from; slower."""


if TYPE_CHECKING:
    HasClass = Section
else:  # `class` is a word of Python's own, and can be no attribute in a class body
    HasClass = create_model(
        "HasClass",
        __base__=Section,
        **{
            "class": (
                ImportPath | None,
                Field(
                    default=None,
                    description="A model class of your own instead, `my.module:Model`: transformers' kind, or any "
                    "module that makes logits of tokens; `config` holds its arguments (docs/extending.md).",
                ),
            )
        },
    )


class ModelSection(HasClass):
    """Which model is trained, and what its weights are at step 0."""

    preset: str | None = None
    """Name of a published or tiny configuration (`windlass init --list`), for example `llama3.2-1b`."""
    path: str | None = None
    """A transformers causal language model instead: hub id or local folder."""
    revision: str | None = None
    """Branch, tag or commit of the hub id."""
    init: Literal["random", "pretrained"] = "random"
    """`random` draws fresh weights from the seed; `pretrained` loads the model's own safetensors."""
    config: dict[str, Any] = Field(default={})
    """Fields of the transformers configuration to change, for example `{num_hidden_layers: 8}`. With `init: pretrained`
    only what leaves the weights as they are: RoPE, `max_position_embeddings`, dropout."""
    attention: Literal["auto", "flash4", "sdpa", "eager", "flex_attention"] = "auto"
    """`flash4`: the flash-attn-4 package (extra `flash`), on Hopper GPUs · `sdpa`: torch's own, cuDNN first there ·
    `eager`, `flex_attention`: transformers' · `auto`: `flash4` where it is installed and was measured faster, else
    `sdpa`, or `eager` for families that transformers runs with nothing else. The log says which kernel ran."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off unless asked by name."""
    lora: LoraSection | None = None
    """Train an adapter (LoRA) and leave the model's own weights as they are; `{}` takes every default."""

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if sum(place is not None for place in (self.preset, self.path, self.own_class)) != 1:
            given = [name for name in ("preset", "path", "class") if getattr(self, name) is not None]
            raise SettingError(
                "give either model.preset or model.path, or a model.class of your own, and not both",
                f"model.{given[-1] if given else 'preset'}",
                None if given else "llama3.2-1b",
                "" if given else "    (windlass init --list has others)",
            )
        if self.own_class and (self.lora or self.init != "random"):
            key, value = ("init", "random") if self.init != "random" else ("lora", None)
            raise SettingError("model.class begins with random weights, and trains all of them", f"model.{key}", value)
        if self.lora and self.init != "pretrained":
            raise SettingError(
                "model.lora trains beside pretrained weights, but model.init is random", "model.init", "pretrained"
            )
        return self

    @property
    def own_class(self) -> str | None:
        """`class`, by a name that Python allows."""
        path: str | None = getattr(self, "class")
        return path

    @property
    def label(self) -> str:
        """Which model it is, for people."""
        return self.preset or self.path or self.own_class or ""


class TrainSection(Section):
    """How long, how fast and with which numbers."""

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""
    global_batch: PositiveInt = 32
    """Sequences per optimizer step over all ranks; the same on any number of ranks."""
    micro_batch: PositiveInt | None = None
    """Sequences a rank takes through the model at once; the rest is accumulated. Default: on GPUs the most that
    `windlass plan` expects to fit into the smallest GPU of the run, else its share, at most 8."""
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    min_learning_rate: NonNegativeFloat | None = None
    """Learning rate at the last step of a decaying schedule. Default: a tenth of the peak."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up; `wsd` is constant and then decays linearly over the last `decay_fraction`."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up. Default: a fiftieth of all steps, none for fewer than 50; a run that goes on keeps the
    number it began with while that fits."""
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
    lean_blocks: bool | None = None
    """Compute q, k and v in one product, gate and up in another, residual sums inside products, and what lies between
    products in one pass each way; with `model.lora` the adapters' products inside their layers'. Default: on GPUs, for
    llama and mistral models with silu and without biases; not with `ddp` unless for LoRA, nor for LoRA beside sharded
    weights, with dropout or on some projections only."""
    fused_head: bool | None = None
    """Compute head and loss together, a block of logits at a time. Default: on GPUs, for families with a plain head."""
    bf16_weights: bool | None = None
    """Hold the weights in bf16 for computing, with fp32 masters in the optimizer alone; the same numbers, fewer copies.
    Needs bf16; not with `model.lora`, `ddp` or `cpu_offload`. Default: on one rank that does not shard; slices can be
    held so too, which pays on few ranks only."""
    balance_experts: NonNegativeFloat | None = None
    """Weight of the loss that spreads tokens evenly over the experts of a mixture; 0: none. Without it a mixture
    trained from scratch ends up using few of them. Default: the model's `router_aux_loss_coef` for random weights,
    0 for pretrained ones."""
    log_every: PositiveInt = 10
    """Steps between log lines. metrics.jsonl has every step whatever this is."""
    validate_every: PositiveInt | None = None
    """Steps between validations; one more at the end. Default: at the end only, if there is validation data."""
    validation_sequences: PositiveInt = 64
    """Sequences per validation, the same ones each time."""
    early_stopping: EarlyStoppingSection | None = None
    """End the run once validations stop improving; `{}` takes every default. Needs `validate_every`."""
    tensorboard: bool = False
    """Also write TensorBoard event files (needs the `tensorboard` extra); the same as `loggers: [tensorboard]`."""
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"] | ImportPath, ...] = ()
    """Where metrics go beside metrics.jsonl: `tensorboard` (extra of that name), `wandb` (extra; offline too) and
    `mlflow` (a server at MLFLOW_TRACKING_URI), or a sink of your own, `my.module:Sink`. A run that is killed goes on
    under the same id (docs/metrics.md)."""
    profile: ProfileSection | None = None
    """Record a trace of some steps and a snapshot of memory; `{}` takes every default."""
    objective: Literal["next_token", "dpo"] = "next_token"
    """`dpo`: prefer chosen answers to rejected ones (`data.format: preference`), held near a reference: with
    `model.lora` the model with its adapter switched off, else a frozen copy of the model as the run began."""
    dpo_beta: PositiveFloat = 0.1
    """How strongly `dpo` holds the model near its reference."""
    loss: ImportPath | None = None
    """A loss of your own, `my.module:loss`: a function of logits and labels (docs/extending.md). Default: the
    cross-entropy of the next token."""
    optimizer: ImportPath | None = None
    """An optimizer of your own, `my.module:make`: a function of named parameters and this section that returns a
    `torch.optim.Optimizer`. Default: AdamW."""
    callbacks: tuple[ImportPath, ...] = ()
    """Callbacks of your own, `my.module:Callback`, called after windlass' own ones."""

    @model_validator(mode="after")
    def schedule_fits(self) -> Self:
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise SettingError(
                f"train.warmup_steps is {self.warmup_steps} but the run has only {self.steps} steps",
                "train.warmup_steps",
                self.steps // 50,
                "    a fiftieth of the steps, as by default",
            )
        if self.min_learning_rate is not None and self.min_learning_rate > self.learning_rate:
            raise SettingError(
                f"train.min_learning_rate {self.min_learning_rate} is above the peak {self.learning_rate}",
                "train.min_learning_rate",
                None,
                "    a tenth of the peak",
            )
        if self.objective == "dpo" and (self.loss or self.fused_head):
            raise SettingError(
                "train.objective dpo computes its own loss: train.loss and train.fused_head are not for it",
                "train.loss" if self.loss else "train.fused_head",
                None,
            )
        if self.early_stopping and not self.validate_every:
            raise SettingError(
                "train.early_stopping looks at validations, but train.validate_every is not set",
                "train.validate_every",
                100,
            )
        return self


class ParallelSection(Section):
    """How the model is spread over ranks."""

    sharding: Literal["auto", "full", "hybrid", "ddp", "none"] = "auto"
    """`full`: FSDP2 over all ranks · `hybrid`: FSDP2 inside groups, copies across them · `ddp`: a whole copy per rank ·
    `none`: one rank only. `auto`: `none` for one rank, else `full`."""
    shard_group: PositiveInt | None = None
    """Ranks per group of `hybrid`, those of `tensor` and `context` among them. Default: the ranks of one node."""
    tensor: PositiveInt = 1
    """Ranks that compute every block together (tensor parallelism): each holds a part of its matrices, and between them
    a part of every sequence. Best within a node. For llama, mistral, mixtral, qwen2 and qwen3 models."""
    context: PositiveInt = 1
    """Ranks that share every sequence (context parallelism), for long ones: each computes a part of its tokens, and
    gathers keys and values of the others. Not with `data.document_mask`."""
    expert: PositiveInt = 1
    """Ranks that share the experts of a mixture (expert parallelism): tokens are sent to the ranks of their experts."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses (FSDP2 only)."""
    activation_checkpointing: Literal["none", "selective", "attention", "full"] = "none"
    """Recompute activations in the backward pass: `full` keeps block inputs only, `selective` keeps matrix products
    and attention outputs, `attention` those of the attention part only: the feed-forward part is computed again."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters between forward and backward: less memory, more communication."""
    timeout_minutes: PositiveFloat = 10.0
    """A collective that takes longer than this ends the attempt. A rank that dies is named by the others in seconds,
    one that sends nothing for 0.8 of this, at most two minutes, with the collective it missed."""
    hang_seconds: NonNegativeFloat | None = None
    """Longest time without a step, saves and validations aside. After it the stacks of all ranks are written, the rank
    that is behind is named, and the attempt ends, to be started again. 0: never. Default: ten times the run's own
    step, twice its longest, and at least 60."""


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
    """CPU threads per rank. Default: OMP_NUM_THREADS where it is set (local runs), else cores divided by ranks."""

    @model_validator(mode="after")
    def one_rank_per_gpu(self) -> Self:
        if self.gpus_per_node and self.processes_per_node not in (None, self.gpus_per_node):
            raise SettingError(
                f"resources.processes_per_node is {self.processes_per_node} but there is one rank per GPU, "
                f"and gpus_per_node is {self.gpus_per_node}",
                "resources.processes_per_node",
                None,
            )
        return self
