"""Peak memory of one GPU rank, item by item. Pure; docs/plan.md says where each number comes from.

A step has a few moments at which memory can peak. Each is a sum of items; the largest sum is the estimate.

Memory of a run that trains on CPUs: what it holds all the time, and so needs at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from windlass.catalog.models import known_config
from windlass.plan.layout import Layout, effective_sharding
from windlass.plan.shape import ModelShape, four_bit_parameters, trained_parameters
from windlass.spec import Run

GIB = 2**30
# Of the fused head: 2 GiB in bf16, or twice that where there would be more than two blocks; each is one more pass over
# the head's gradient.
LOGITS_PER_BLOCK = 2**30
# Of a tensor group's head, which has them in fp32 twice beside what it multiplies.
SPLIT_LOGITS_PER_BLOCK = 2**26
WORKSPACE = 0.01  # libraries' workspaces and small tensors, as a share of everything else
BLOCKS_GATHERED = 2  # FSDP2 gathers the next block while one computes
FOUR_BIT_BYTES = 0.5 + 4 / 64  # of a weight: its level, and its share of a block's scale
RESERVE = 0.07  # of a GPU's memory: CUDA's context, NCCL's buffers, fragmentation

Items = dict[str, float]


@dataclass(frozen=True)
class MemoryEstimate:
    """What is allocated at the fullest moment of a run, as `torch.cuda.max_memory_allocated` counts it."""

    moment: str
    items: tuple[tuple[str, float], ...]  # name, bytes; largest first
    host_bytes: float  # of one rank: offloaded state

    @property
    def peak_bytes(self) -> float:
        return sum(size for _, size in self.items)

    @property
    def peak_gib(self) -> float:
        return self.peak_bytes / GIB


def estimate_memory(shape: ModelShape, layout: Layout) -> MemoryEstimate:
    moments = dict(_moments(shape, layout))
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    items = {name: size for name, size in moments[moment].items() if size > 0}
    items["workspace"] = WORKSPACE * sum(items.values())
    return MemoryEstimate(
        moment=moment,
        items=tuple(sorted(items.items(), key=lambda item: -item[1])),
        host_bytes=_host_bytes(shape, layout) if layout.cpu_offload else 0.0,
    )


def _host_bytes(shape: ModelShape, layout: Layout) -> float:
    if layout.trained is not None:
        return (layout.element * shape.parameters + 16.0 * layout.trained) / layout.shards
    return 16.0 * shape.parameters / layout.shards


def gathered_block(shape: ModelShape, layout: Layout) -> float:
    """Parameters of one block that a rank computes with: experts are shared, all else is cut by a tensor group."""
    rest = shape.block_parameters - shape.expert_parameters
    return rest / layout.tensor + shape.expert_parameters / layout.expert


def _moments(shape: ModelShape, layout: Layout) -> Iterator[tuple[str, Items]]:
    if layout.trained is not None:
        yield from _lora_moments(shape, layout, layout.trained)
        return
    tokens = layout.tokens
    state, waiting = _state(shape, layout), _gradients_between(shape, layout)
    kept = {"activations": tokens * (shape.layers * saved_per_layer(shape, layout) + _saved_outside(shape, layout))}
    head = layout.element * shape.head_parameters / layout.tensor
    block_work = tokens * _backward_work(shape, layout)
    held = {"bf16 casts": _casts(shape, layout)}
    gathered = _gathered(shape, layout, _last_group(shape, layout))
    yield (
        "head",
        state | kept | held | gathered | {"gradients": waiting + head, "logits": _logits(shape, layout)},
    )
    # A head that is a group of its own was let go while blocks go backward, and an embedding is not needed yet.
    others = 0 if _apart(shape, layout) else shape.root_parameters
    backward = state | _gathered(shape, layout, others) | {"backward of a block": block_work}
    # As computed, or this rank's part of the sum: one that is a group of its own is with the other ranks by then.
    of_head = 4.0 * shape.head_parameters / (layout.shards * layout.tensor) if _apart(shape, layout) else head
    of_block = _block_gradients(shape, layout)
    yield "first block of the backward pass", backward | kept | held | {"gradients": waiting + of_head + of_block}
    yield "last block of the backward pass", backward | {"gradients": _gradients_of_blocks(shape, layout) + of_block}
    ending = state | _gathered_at_end(shape, layout) | _gradients_at_end(shape, layout)
    yield (
        "end of the backward pass",
        ending | {"gradient of embedded tokens": float(tokens * layout.element * shape.width)},
    )
    if layout.validates:
        yield ("validation", state | gathered | {"logits": _logits(shape, layout)})


def _lora_moments(shape: ModelShape, layout: Layout, trained: int) -> Iterator[tuple[str, Items]]:
    """Beside frozen weights: they have neither masters nor gradients nor moments; what trains is small and fp32."""
    tokens, frozen = layout.tokens, float(shape.parameters - layout.four_bits)
    state: Items = {} if layout.cpu_offload else {"frozen weights": layout.element * frozen / layout.shards}
    state |= {"4-bit weights": layout.four_bits * FOUR_BIT_BYTES}
    state |= {"adapters and moments": 0.0 if layout.cpu_offload else 12.0 * trained / layout.shards}
    gradients = {"gradients": 4.0 * trained / (layout.shards if layout.is_fsdp else 1)}
    kept = {"activations": tokens * (shape.layers * saved_per_layer(shape, layout) + _saved_outside(shape, layout))}
    gathered = _gathered(shape, layout, _last_group(shape, layout))
    # One matrix at a time is brought back from 4 bits.
    back = {
        "a matrix out of 4 bits": float(layout.element * shape.width * shape.ffn_width) if layout.four_bits else 0.0
    }
    yield "head", state | kept | gathered | gradients | back | {"logits": _logits(shape, layout)}
    work = {"backward of a block": tokens * _backward_work(shape, layout)}
    yield "first block of the backward pass", state | kept | gathered | gradients | back | work
    if layout.validates:
        yield "validation", state | gathered | {"logits": _logits(shape, layout)}


# State and gradients


def _state(shape: ModelShape, layout: Layout) -> Items:
    """What is there all the time."""
    count = float(shape.parameters)
    if layout.cpu_offload:
        return {}
    mine = count / (layout.shards * layout.tensor)
    if layout.bf16_weights:
        return {"bf16 weights": 2 * mine, "fp32 masters": 4 * mine, "moments": 8 * mine}
    return {"fp32 weights": 4 * mine, "moments": 8 * mine}


def _gradients_between(shape: ModelShape, layout: Layout) -> float:
    """Gradients that are there when a forward pass begins: sums over earlier micro-batches, or DDP's buckets."""
    if layout.sharding == "ddp":
        return 4.0 * shape.parameters
    if layout.num_micro == 1 or (layout.is_fsdp and layout.cpu_offload):
        return 0.0
    return 4.0 * shape.parameters / (layout.shards * layout.tensor if layout.is_fsdp else 1)


def _apart(shape: ModelShape, layout: Layout) -> bool:
    """Whether embedding and head are groups of their own in FSDP2, each gathered and let go by itself."""
    return layout.is_fsdp and layout.shards > 1 and not shape.tied and not layout.cpu_offload


def _block_gradients(shape: ModelShape, layout: Layout) -> float:
    """Of the block under way, as computed; in FSDP2 those of the one before are on their way in fp32."""
    return (layout.element + (4.0 if layout.is_fsdp else 0.0)) * gathered_block(shape, layout)


def _gradients_of_blocks(shape: ModelShape, layout: Layout) -> float:
    """Of the head and of all blocks, when the last of them goes backward."""
    if not layout.is_fsdp:
        return _gradients_at_end(shape, layout)["gradients"] - _block_gradients(shape, layout)
    own = 0.0 if layout.cpu_offload else 1 / (layout.shards * layout.tensor)
    blocks = shape.parameters - shape.root_parameters
    if _apart(shape, layout):
        return 4.0 * own * (blocks + shape.head_parameters)
    return 4.0 * own * blocks + layout.element * shape.head_parameters / layout.tensor


def _gradients_at_end(shape: ModelShape, layout: Layout) -> Items:
    if layout.is_fsdp:
        element = 2.0 if layout.bf16_weights and layout.num_micro == 1 else 4.0
        sharded = 0.0 if layout.cpu_offload else element * shape.parameters / (layout.shards * layout.tensor)
        # as computed, and in fp32 on its way to other ranks; of one shard that is what stays
        last = layout.element + (0.0 if layout.shards == 1 and element == 4.0 else 4.0)
        return {"gradients": sharded + last * _last_group(shape, layout) / layout.tensor}
    if layout.bf16_weights and layout.num_micro == 1:
        return {"gradients": 2.0 * shape.parameters}
    return {"gradients": 4.0 * shape.parameters}


def _last_group(shape: ModelShape, layout: Layout) -> int:
    """Parameters outside blocks that are gathered together: all of them, or those of embedding and head each."""
    return shape.head_parameters if _apart(shape, layout) else shape.root_parameters


def _gathered(shape: ModelShape, layout: Layout, others: int) -> Items:
    """Whole weights of sharded blocks, and so many parameters of the others, in the type that is computed with."""
    if not layout.is_fsdp:
        return {}
    blocks = min(BLOCKS_GATHERED, shape.layers) if layout.reshard else shape.layers
    return {"gathered weights": layout.element * (blocks * gathered_block(shape, layout) + others / layout.tensor)}


def _gathered_at_end(shape: ModelShape, layout: Layout) -> Items:
    whole = layout.element * _last_group(shape, layout) / layout.tensor
    return {"gathered weights": whole} if layout.is_fsdp else {}


def _casts(shape: ModelShape, layout: Layout) -> float:
    """Weights as autocast made them, which the backward pass needs again; blocks that recompute cast again."""
    blocks = shape.layers if layout.recompute == "none" else 1
    return 2.0 * (blocks * shape.block_parameters + shape.head_parameters) if layout.autocast else 0.0


# Activations


def saved_per_layer(shape: ModelShape, layout: Layout) -> float:
    """Bytes per token that one block keeps for its backward pass."""
    if layout.tensor > 1 or layout.context > 1:
        return _saved_per_layer_of_part(shape, layout)
    d, f, q, kv = shape.width, shape.ffn_width, shape.query_width, shape.kv_width
    statistics = 4.0 * shape.heads + 8.0  # log-sum-exp of every head, one scale of each norm, in fp32
    residual = 2.0 * d if layout.autocast else 0.0  # the stream itself stays fp32 under autocast
    if layout.recompute == "full":
        return layout.element * d + residual
    if layout.recompute == "selective":  # the block's input, q, k, v, attention, its projection, gate, up
        return layout.element * (2 * d + 2 * q + 2 * kv + 2 * f) + statistics + residual
    if layout.recompute == "attention":
        return layout.element * (2 * d + 2 * q + 2 * kv) + statistics + residual
    if layout.compiled:  # … both norms' outputs and the product of gate and up as well: matmuls take them
        whole = layout.element * (4 * d + 2 * q + 2 * kv + 3 * f + expert_rows(shape)) + statistics + residual
        if layout.trained is not None and layout.lean:  # attention's output once more, with its adapter's beside it
            whole += layout.element * q
        return whole - (layout.element - 1) * (2 * d + q + f) if layout.fp8 else whole  # kept as the products read them
    # Run op by op, each norm also keeps its input in fp32 and its normalized input, and SiLU its output.
    norms = (4.0 + layout.element) * 2 * d + layout.element * 2 * d
    return norms + layout.element * (2 * q + 2 * kv + 4 * f) + statistics


def _saved_per_layer_of_part(shape: ModelShape, layout: Layout) -> float:
    """The same on a rank of a tensor group, per token of the group; with `context` per token of this rank.

    Of the residual stream a rank has its part of the sequences, of all else its part of the width. What the products
    read are whole sequences; where nothing is computed again they are kept.
    """
    d, f, q, kv = shape.width, shape.ffn_width, shape.query_width, shape.kv_width
    statistics = 4.0 * shape.heads + 8.0
    kept = {
        "none": 2 * d + 2 * q + 2 * kv + 3 * f + expert_rows(shape),
        "selective": 2 * d + 2 * q + 2 * kv + 2 * f,
        "attention": 2 * d + 2 * q + 2 * kv,
        "full": d,
    }[layout.recompute]
    if layout.recompute == "full":
        return layout.element * kept / layout.tensor
    inputs = 2 * d if layout.recompute == "none" else 0
    gathered = gathered_keys(shape, layout) if layout.recompute == "none" else 0.0
    return (layout.element * kept + statistics) / layout.tensor + layout.element * inputs + gathered


def expert_rows(shape: ModelShape) -> int:
    """Elements per token that a mixture keeps: what its experts read and what they return, once for each it meets."""
    return 2 * shape.experts_met * shape.width if shape.expert_parameters else 0


def gathered_keys(shape: ModelShape, layout: Layout) -> float:
    """Bytes of keys and values of all ranks that share sequences, per token of one: each of two pieces its own."""
    if layout.context == 1:
        return 0.0
    return layout.element * 2 * shape.kv_width * (layout.context + 0.5) / layout.tensor


def _saved_outside(shape: ModelShape, layout: Layout) -> float:
    """Bytes per token of the final norm, its output, and the head's gradient for it."""
    norm = ((0.0 if layout.compiled else 4.0) + layout.element) / layout.tensor
    return (norm + 2 * layout.element) * shape.width


def _backward_work(shape: ModelShape, layout: Layout) -> float:
    """Bytes per token in use while one block goes backward: gradients inside it, and what it computes again."""
    part = layout.tensor
    inside = layout.element * (2 * shape.ffn_width / part + 2 * shape.width) + gathered_keys(shape, layout)
    if layout.recompute == "none":
        return float(inside)
    stream = 4 * shape.width if part == 1 else 2 * shape.width / part + 2 * shape.width
    widths = (2 * shape.query_width + 2 * shape.kv_width + 3 * shape.ffn_width + expert_rows(shape)) / part
    again = layout.element * (stream + widths) + gathered_keys(shape, layout)
    return float(inside + again - (saved_per_layer(shape, layout) if layout.recompute != "full" else 0))


def _logits(shape: ModelShape, layout: Layout) -> float:
    if layout.tensor > 1:
        own = shape.vocabulary // layout.tensor
        return float((layout.element + 8) * own * rows_per_block(own, layout.tokens, SPLIT_LOGITS_PER_BLOCK))
    if layout.fused_head:
        return float(layout.element * shape.vocabulary * rows_per_block(shape.vocabulary, layout.tokens))
    # logits, their fp32 copy and its log-softmax; the copy is the logits themselves in fp32
    return layout.tokens * shape.vocabulary * (10.0 if layout.precision == "bf16" else 8.0)


def rows_per_block(vocabulary: int, tokens: int, limit: int = LOGITS_PER_BLOCK) -> int:
    """Tokens whose logits exist at once in the fused head: as few blocks as the limit allows, of about equal size."""
    blocks = -(-tokens * vocabulary // limit)
    if blocks > 2:
        blocks = max(2, -(-tokens * vocabulary // (2 * limit)))
    return -(-tokens // blocks)


TRAINED_BYTES = 16  # of a parameter: weight, gradient and two moments of AdamW in fp32
PROCESS_BYTES = 300 * 2**20  # of a rank before it has a model: Python, torch, transformers


@dataclass(frozen=True)
class HostMemory:
    """What all ranks of one machine hold together; activations come on top of it."""

    state_bytes: float
    ranks: int
    copies: int  # of the model, on this machine
    evidence: str

    @property
    def bytes(self) -> float:
        return self.state_bytes + self.ranks * PROCESS_BYTES


def host_memory(run: Run, world_size: int) -> HostMemory | None:
    """None where the model's size is not known before it is built."""
    shape = ModelShape.of(known_config(run.model))
    if shape is None:
        return None
    ranks = max(1, world_size // run.resources.nodes)
    sharding = effective_sharding(run, world_size)
    copies = ranks
    if sharding == "full":
        copies = 1
    elif sharding == "hybrid":
        copies = max(1, ranks // (run.parallel.shard_group or ranks))
    trained = trained_parameters(run, shape)
    if trained is None:
        copy_bytes: float = shape.parameters * TRAINED_BYTES
        evidence = f"{shape.parameters:,} parameters × {TRAINED_BYTES} bytes: weight, gradient, two moments of AdamW"
    else:
        packed = four_bit_parameters(run, shape)
        element = 2 if run.train.precision == "bf16" else 4
        copy_bytes = (shape.parameters - packed) * element + packed * FOUR_BIT_BYTES + trained * TRAINED_BYTES
        evidence = f"{shape.parameters:,} frozen parameters and {trained:,} that train"
    if sharding == "full":
        copy_bytes /= run.resources.nodes
    return HostMemory(
        copy_bytes * copies, ranks, copies, evidence + (f", {copies} copies of them" if copies > 1 else "")
    )
