"""How a run lies on its ranks and which fast paths it takes: decided here, once, for the plan and for the trainer.

Pure. What depends on the built model or on the machine enters as `Facts`: a plan assumes them, the trainer looks. What
a run asks for by name and cannot have is an error, what it leaves open is off then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from windlass.catalog.gpus import Gpu
from windlass.catalog.models import known_config
from windlass.errors import UserError
from windlass.plan.shape import ModelShape, four_bit_parameters, is_adapted_whole, trained_parameters
from windlass.spec import Run

# Families whose logits are exactly head(backbone(tokens)): no soft caps, scales or biases after it. Their attention is
# plain causal attention too, without sinks, caps or biases.
PLAIN_HEADS = {"llama", "mistral", "mixtral", "qwen2", "qwen3"}
LEAN = {"llama", "mistral"}  # families whose blocks can be lean ones
OWN_ATTENTION = ("auto", "flash4", "sdpa")  # values of model.attention that are not transformers' own
FLASH4_HEAD_SIZES = (64, 128)  # at which flash-attn-4 was measured against cuDNN, and was faster
HOPPER = {"H100", "H200"}  # the only GPUs it was measured on


@dataclass(frozen=True)
class Facts:
    """What the choice of fast paths depends on beside the run."""

    family: str
    head_dim: int
    activation: str
    window: int | None  # tokens that attention goes back
    attention_dropout: float
    biases: bool  # of linear layers
    trained: int | None = None  # parameters that train beside frozen ones; None: all of the model's do
    four_bits: int = 0  # of the frozen ones, those held in 4 bits
    lean_lora_obstacle: str = ""  # what about the adapters keeps blocks from being lean
    cuda: bool = True
    flash4_obstacle: str = ""  # what about the GPU or its packages keeps flash-attn-4 from it

    @classmethod
    def of(cls, config: Mapping[str, Any], **others: Any) -> Self:
        """From a transformers configuration."""
        heads = config.get("num_attention_heads") or 1
        return cls(
            family=str(config.get("model_type")),
            head_dim=int(config.get("head_dim") or (config.get("hidden_size") or 0) // heads),
            activation=str(config.get("hidden_act") or "silu"),
            window=config.get("sliding_window") if config.get("use_sliding_window", True) else None,
            attention_dropout=float(config.get("attention_dropout") or 0.0),
            biases=bool(config.get("attention_bias") or config.get("mlp_bias")),
            **others,
        )

    @classmethod
    def assumed(cls, run: Run, shape: ModelShape, gpu: Gpu | None) -> Self:
        """Of a run on GPUs that have everything installed; without `gpu` on one that suits every path."""
        config = known_config(run.model) or {"model_type": shape.family, "head_dim": shape.head_dim}
        lora, obstacle = run.model.lora, ""
        if lora and not is_adapted_whole(run, shape):
            obstacle = "model.lora.targets leaves out some of the blocks' projections"
        elif lora and lora.dropout:
            obstacle = "model.lora.dropout"
        hopper = gpu is None or gpu.name in HOPPER
        return cls.of(
            config,
            trained=trained_parameters(run, shape),
            four_bits=four_bit_parameters(run, shape),
            lean_lora_obstacle=obstacle,
            flash4_obstacle="" if hopper or gpu is None else not_hopper(gpu.name),
        )


@dataclass(frozen=True)
class Layout:
    ranks: int
    sharding: str  # full, hybrid, ddp or none
    shards: int  # ranks that hold one copy of the state together
    micro: int  # sequences of a micro-batch
    num_micro: int  # micro-batches of a rank per step
    length: int
    precision: str  # bf16 or fp32
    fp8: bool  # the blocks' matrix products
    bf16_weights: bool  # computes in bf16 copies; fp32 masters in the optimizer alone
    fused_head: bool
    attention: str  # flash4, sdpa (with a mask), sdpa_causal, or transformers' own
    lean: bool  # joined projections, residual sums inside products
    packed: bool  # documents kept apart
    compiled: bool
    recompute: str  # none, selective or full
    cpu_offload: bool
    reshard: bool
    validates: bool
    trained: int | None = None  # parameters that train beside frozen ones; None: all of the model's do
    four_bits: int = 0  # of the frozen ones, those held in 4 bits
    flash4_obstacle: str = ""  # why attention is not flash-attn-4

    @classmethod
    def resolve(
        cls, run: Run, world_size: int, micro: int, facts: Facts, *, local_world_size: int | None = None
    ) -> Self:
        """The layout of a resolved run with a given micro-batch."""
        sharding = effective_sharding(run, world_size)
        copies = bf16_weights(run, sharding)
        attention, obstacle = choose_attention(run, facts)
        return cls(
            ranks=world_size,
            sharding=sharding,
            shards={"hybrid": shard_group(run, world_size, local_world_size), "full": world_size}.get(sharding, 1),
            micro=micro,
            num_micro=-(-rows_per_rank(run, world_size) // micro),
            length=run.data.sequence_length or 0,
            precision=run.train.precision,
            fp8=run.train.fp8,
            bf16_weights=copies,
            fused_head=fused_head(run, facts),
            attention=attention,
            lean=lean_blocks(run, facts, sharding, bf16_copies=copies),
            packed=bool(run.data.document_mask),
            compiled=facts.cuda if run.train.compile is None else run.train.compile,
            recompute=run.parallel.activation_checkpointing,
            cpu_offload=run.parallel.cpu_offload,
            reshard=run.parallel.reshard_after_forward,
            validates=bool(run.data.validation_source or run.data.holdout),
            trained=facts.trained,
            four_bits=facts.four_bits,
            flash4_obstacle=obstacle,
        )

    @classmethod
    def planned(cls, run: Run, world_size: int, micro: int, shape: ModelShape, gpu: Gpu | None = None) -> Self:
        return cls.resolve(run, world_size, micro, Facts.assumed(run, shape, gpu))

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro * self.length

    @property
    def is_fsdp(self) -> bool:
        return self.sharding in ("full", "hybrid")

    @property
    def autocast(self) -> bool:
        """fp32 weights, cast on every use."""
        return self.precision == "bf16" and not self.is_fsdp and not self.bf16_weights and self.trained is None

    @property
    def flash4(self) -> bool:
        return self.attention == "flash4"

    @property
    def element(self) -> int:
        """Bytes of a number that is computed with."""
        return 2 if self.precision == "bf16" else 4


def effective_sharding(run: Run, world_size: int) -> str:
    if run.parallel.sharding != "auto":
        return run.parallel.sharding
    if world_size == 1 and not run.parallel.cpu_offload:
        return "none"
    return "ddp" if run.model.lora and run.model.lora.quantize else "full"


def shard_group(run: Run, world_size: int, local_world_size: int | None = None) -> int:
    """Ranks per group of `hybrid`: as asked, else those of a node, as many as there are or as nodes are asked for."""
    return run.parallel.shard_group or local_world_size or max(1, world_size // run.resources.nodes)


def rows_per_rank(run: Run, world_size: int) -> int:
    """Sequences of a step that the fullest rank takes."""
    return -(-run.train.global_batch // world_size)


def bf16_weights(run: Run, sharding: str) -> bool:
    """Compute in bf16 weights whose fp32 masters only the optimizer sees: whole, or this rank's slices of them.

    Of slices only where asked: FSDP2 casts a slice when it gathers it, which costs less the more ranks there are, and
    the copy would cost memory.
    """
    possible = run.train.precision == "bf16" and sharding != "ddp" and not run.parallel.cpu_offload
    possible = possible and run.train.optimizer is None
    possible = possible and run.model.lora is None  # adapters are small, and frozen weights have no masters
    if run.train.bf16_weights and not possible:
        offload = ", parallel.cpu_offload" if run.parallel.cpu_offload else ""
        raise UserError(
            "train.bf16_weights cannot be had here",
            evidence=f"sharding {sharding}{offload}, {run.train.precision}{', model.lora' if run.model.lora else ''}",
            cause="it needs bf16, no model.lora, no CPU offload, and sharding other than ddp",
            fix="train.bf16_weights=false",
        )
    return possible and sharding == "none" if run.train.bf16_weights is None else run.train.bf16_weights


def fused_head(run: Run, facts: Facts) -> bool:
    """Asked for by name, or by default on GPUs; on CPUs torch's own cross-entropy is the faster one."""
    if run.train.fused_head is None:
        return facts.cuda and facts.family in PLAIN_HEADS and not (run.train.loss or run.train.objective == "dpo")
    if run.train.fused_head and facts.family not in PLAIN_HEADS:
        raise UserError(
            f"train.fused_head is not known to be right for {facts.family} models",
            evidence=f"it is for {', '.join(sorted(PLAIN_HEADS))}",
            fix="train.fused_head=false",
        )
    return run.train.fused_head


def choose_attention(run: Run, facts: Facts) -> tuple[str, str]:
    """Which attention, and why not flash-attn-4: `auto` takes that where it works and was measured faster."""
    requested = run.model.attention
    if requested not in OWN_ATTENTION:
        return requested, ""
    obstacle = (
        "model.attention is sdpa" if requested == "sdpa" else flash4_unsuited(run, facts) or facts.flash4_obstacle
    )
    if not obstacle:
        return "flash4", ""
    if requested == "flash4":
        raise UserError("model.attention=flash4 cannot be had here", evidence=obstacle, fix="model.attention=auto")
    if facts.family not in PLAIN_HEADS:
        return "transformers", obstacle
    return "sdpa" if run.data.document_mask or has_window(run, facts) else "sdpa_causal", obstacle


def flash4_unsuited(run: Run, facts: Facts) -> str:
    """Why flash-attn-4 does not compute what the model needs; empty where it does."""
    if facts.family not in PLAIN_HEADS:
        return f"{facts.family} models may need more than plain causal attention"
    if run.train.precision != "bf16":
        return f"it computes in bf16, train.precision is {run.train.precision}"
    if has_window(run, facts):
        return f"attention goes {facts.window} tokens back, which it is not told"
    if facts.attention_dropout:
        return f"attention_dropout is {facts.attention_dropout}, which it does not do"
    if facts.cuda and facts.head_dim not in FLASH4_HEAD_SIZES:  # without a GPU its plain twin computes any
        return f"head size {facts.head_dim} is not one of {', '.join(map(str, FLASH4_HEAD_SIZES))}"
    return ""


def not_hopper(gpu: str) -> str:
    return f"{gpu} is not a Hopper GPU, the only kind it was measured on"


def has_window(run: Run, facts: Facts) -> bool:
    return facts.window is not None and facts.window < (run.data.sequence_length or 0)


def lean_blocks(run: Run, facts: Facts, sharding: str, *, bf16_copies: bool) -> bool:
    requested = run.train.lean_blocks
    if requested is False or (requested is None and not facts.cuda):
        return False
    obstacle = obstacle_to_lean_blocks(run, facts, sharding, bf16_copies=bf16_copies)
    if obstacle and requested:
        raise UserError("train.lean_blocks cannot be had here", evidence=obstacle, fix="train.lean_blocks=false")
    return not obstacle


def obstacle_to_lean_blocks(run: Run, facts: Facts, sharding: str, *, bf16_copies: bool) -> str:
    if facts.family not in LEAN:
        return f"{facts.family} blocks are not {' or '.join(sorted(LEAN))} blocks"
    if run.train.objective == "dpo":
        return "train.objective is dpo, which computes with the adapter on and off"
    if facts.activation != "silu":
        return f"the activation is {facts.activation}, not silu"
    sharded = sharding in ("full", "hybrid")
    if run.model.lora is not None:
        if sharded:
            return "model.lora beside sharded weights"
        if facts.lean_lora_obstacle:
            return facts.lean_lora_obstacle
    elif run.train.precision != "bf16":
        return f"train.precision is {run.train.precision}"
    elif not bf16_copies and not sharded:
        return "fp32 weights are cast on every use: sharding is ddp, or train.bf16_weights is off"
    if run.train.fp8:
        return "train.fp8 computes the products in another way"
    if run.model.attention not in OWN_ATTENTION:
        return f"model.attention is {run.model.attention}"
    return "the model's linear layers have biases" if facts.biases else ""
