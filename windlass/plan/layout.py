"""How the trainer will lay a run out on its ranks: the choices that decide memory and speed, spelled out."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.plan.resolution import effective_sharding, shard_group
from windlass.plan.shape import ModelShape, four_bit_parameters, trained_parameters
from windlass.spec import Run

# Families whose logits are exactly head(backbone(tokens)): no soft caps, scales or biases after it.
PLAIN_HEADS = {"llama", "mistral", "mixtral", "qwen2", "qwen3"}
LEAN = {"llama", "mistral"}  # families whose blocks can be lean ones


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
    flash4: bool  # attention by flash-attn-4, on GPUs where the trainer takes it
    lean: bool  # joined projections, residual sums inside products
    packed: bool  # documents kept apart
    compiled: bool
    recompute: str  # none, selective or full
    cpu_offload: bool
    reshard: bool
    validates: bool
    trained: int | None = None  # parameters that train beside frozen ones; None: all of the model's do
    four_bits: int = 0  # of the frozen ones, those held in 4 bits

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
    def element(self) -> int:
        """Bytes of a number that is computed with."""
        return 2 if self.precision == "bf16" else 4


def layout(run: Run, world_size: int, micro: int, shape: ModelShape) -> Layout:
    """The layout of a resolved run on GPUs with a given micro-batch."""
    sharding = effective_sharding(run, world_size)
    rows = -(-run.train.global_batch // world_size)
    shards = {"hybrid": shard_group(run, world_size), "full": world_size}.get(sharding, 1)
    whole = run.train.precision == "bf16" and sharding != "ddp" and not run.parallel.cpu_offload
    fused = run.train.fused_head
    asked = run.train.bf16_weights if run.train.bf16_weights is not None else sharding == "none"
    copies = whole and run.model.lora is None and asked
    gathered = run.train.precision == "bf16" and sharding in ("full", "hybrid")
    lean = shape.family in LEAN and not run.train.fp8 and run.train.lean_blocks is not False
    lean = lean and (copies or gathered if run.model.lora is None else lean_lora(run, sharding))
    flash4 = run.model.attention in ("auto", "flash4") and run.train.precision == "bf16"
    return Layout(
        ranks=world_size,
        sharding=sharding,
        shards=shards,
        micro=micro,
        num_micro=-(-rows // micro),
        length=run.data.sequence_length or 0,
        precision=run.train.precision,
        fp8=run.train.fp8,
        bf16_weights=copies,
        fused_head=shape.family in PLAIN_HEADS if fused is None else fused,
        flash4=flash4 and shape.family in PLAIN_HEADS,
        packed=bool(run.data.document_mask),
        lean=lean and run.model.attention in ("auto", "flash4", "sdpa"),
        compiled=run.train.compile is not False,
        recompute=run.parallel.activation_checkpointing,
        cpu_offload=run.parallel.cpu_offload,
        reshard=run.parallel.reshard_after_forward,
        validates=bool(run.data.validation_source or run.data.holdout),
        trained=trained_parameters(run, shape),
        four_bits=four_bit_parameters(run, shape),
    )


def lean_lora(run: Run, sharding: str) -> bool:
    """Beside frozen weights that every rank has whole, where each projection has an adapter without dropout."""
    lora = run.model.lora
    return lora is not None and sharding in ("none", "ddp") and not lora.targets and not lora.dropout
