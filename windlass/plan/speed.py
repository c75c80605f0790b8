"""Time of one optimizer step on one GPU rank, part by part. Pure; docs/plan.md says how it was calibrated.

Matrix products and attention go by FLOPs, everything else by the bytes it moves. Other GPUs than the H200 are scaled
by their dense peak and their bandwidth. A step takes no less than the host needs to launch its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.catalog.gpus import Gpu
from windlass.catalog.instances import Instance
from windlass.plan.layout import Layout
from windlass.plan.shape import ModelShape

PCIE_GB_S = 32.0  # one direction of a ×16 slot, generation 4, where there is no NVLink
DEFAULT_NETWORK_GBPS = 100.0  # between nodes that are not in the catalogue

# Of the dense peak over a whole step: large products alone reach 0.8, power limits and gaps cost the rest.
MATMUL_SHARE = 0.66
FP8_FACTOR = 1.65  # of the bf16 rate in the blocks, of the 2 in the data sheet
FP32_SHARE = 0.80
BANDWIDTH_SHARE = 0.90  # 4.3 of the H200's 4.8 TB/s
H200_BF16 = 989.0
# H200, causal, by head size: forward, backward.
CUDNN_TFLOPS = {64: (457.0, 420.0), 128: (648.0, 537.0)}
FLASH4_TFLOPS = {64: (555.0, 539.0), 128: (687.0, 609.0)}
EAGER_FACTOR = 4.8  # traffic of unfused elementwise work over fused, on the H200
# Per parameter and micro-batch: casts, copies into and out of the collectives' buffers. bf16 shards need no cast.
FSDP_COPY_BYTES, FSDP_BF16_BYTES = 34.0, 28.0
DOCUMENT_TOKENS = 1024  # of a packed document, where nobody has read the data yet
# Per weight and pass over a micro-batch's blocks: read, brought back, both ways.
FOUR_BIT_TRAFFIC = 2 * (0.5 + 4 / 64 + 2)
AUTOCAST_BYTES = 12.0  # per parameter and micro-batch: weights down to bf16, gradients up to fp32
FEED_FORWARD_AGAIN = 0.5  # of a block's forward products: gate and up, where only attention's are kept
LINK_SHARE = 0.75  # of a link's rate that collectives reach
OVERLAP_COST = 0.3  # of hidden communication still seen: it takes memory bandwidth and SMs, and has edges
HOST_LINK_GB_S = 25.0  # pinned copies between GPU and host

# The host's own time, of a step, and of a block in each micro-batch: a middle of three hosts of H200s, which differ by
# half from each other.
HOST_STEP_S, HOST_BLOCK_S = 5.4e-3, 4.0e-3
HOST_FSDP_S, HOST_LORA_S = 4.4e-3, 1.5e-3  # more of a block: gathering and scattering; adapters and their optimizer
HOST_RECOMPUTE_S, HOST_FOUR_BIT_S = 2.7e-3, 2.3e-3  # the second once more by half where the forward pass is
LAUNCH_BOUND_S = 0.01  # where the GPU has less to do than this, a host's own pace is all that counts
WAITING = "waiting for the host"


@dataclass(frozen=True)
class Hardware:
    """What a plan runs on: one kind of GPU, how many per node, and what connects them."""

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    instance: Instance | None = None

    @property
    def ranks(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def has_nvlink(self) -> bool:
        return self.gpu.nvlink_gb_s is not None and (self.instance is None or self.instance.nvlink)

    @property
    def link_gb_s(self) -> float:
        """Between GPUs of one node, per GPU, in one direction."""
        return (self.gpu.nvlink_gb_s or 0.0) / 2 if self.has_nvlink else PCIE_GB_S

    @property
    def network_gb_s(self) -> float:
        """Out of one node, in one direction."""
        known = self.instance.network_gbps if self.instance else None
        return (known or DEFAULT_NETWORK_GBPS) / 8

    def describe(self) -> str:
        where = f" ({self.instance.type})" if self.instance else ""
        return f"{self.nodes} × {self.gpus_per_node} {self.gpu.name}{where}"


@dataclass(frozen=True)
class SpeedEstimate:
    parts: tuple[tuple[str, float], ...]  # name, seconds of a step
    tokens_per_step: int  # of all ranks
    flops_per_step: float  # of the model on one rank: causal attention, nothing counted twice
    peak_flops: float

    @property
    def step_s(self) -> float:
        return sum(seconds for _, seconds in self.parts)

    @property
    def busy_s(self) -> float:
        """What the GPU itself takes."""
        return self.step_s - dict(self.parts).get(WAITING, 0.0)

    @property
    def launch_bound(self) -> bool:
        """Whether the GPU has so little to do that only the host's pace counts, which nobody has measured."""
        return self.busy_s < LAUNCH_BOUND_S

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        return self.flops_per_step / self.step_s / self.peak_flops


def estimate_speed(shape: ModelShape, layout: Layout, hardware: Hardware, *, global_batch: int) -> SpeedEstimate:
    gpu, micros = hardware.gpu, layout.num_micro
    bandwidth = gpu.bandwidth_tb_s * 1e12 * BANDWIDTH_SHARE
    matmul, attention = _matmul_s(shape, layout, gpu), _attention_s(shape, layout, gpu)
    moved = _elementwise_bytes(shape, layout) + _head_bytes(shape, layout) + _weight_bytes(shape, layout)
    parts = {
        "matrix products": micros * matmul / layout.tensor,
        "attention": micros * attention / layout.tensor,
        "elementwise": micros * moved / layout.tensor / bandwidth,
        "optimizer": _optimizer_s(shape, layout, bandwidth),
    }
    parts |= {"parts of blocks exchanged": micros * _exchange_s(shape, layout, hardware)}
    compute = sum(parts.values())
    communication = _communication_s(shape, layout, hardware)
    parts["communication not hidden"] = max(0.0, communication - compute) + OVERLAP_COST * min(communication, compute)
    parts[WAITING] = max(0.0, _host_s(shape, layout) - sum(parts.values()))
    tokens = micros * layout.tokens / layout.tensor
    flops = tokens * flops_per_token(shape, layout.length)
    peak = (gpu.bf16_tflops or gpu.fp32_tflops) if layout.precision == "bf16" else gpu.fp32_tflops
    return SpeedEstimate(
        parts=tuple((name, seconds) for name, seconds in parts.items() if seconds > 0),
        tokens_per_step=global_batch * layout.length,
        flops_per_step=flops,
        peak_flops=peak * 1e12,
    )


def _host_s(shape: ModelShape, layout: Layout) -> float:
    """What Python and the launches of a step take."""
    recomputes = layout.recompute == "full"
    block = HOST_BLOCK_S + (HOST_RECOMPUTE_S if recomputes else 0.0)
    block += HOST_FSDP_S if layout.is_fsdp else 0.0
    block += HOST_LORA_S if layout.trained is not None else 0.0
    block += HOST_FOUR_BIT_S * (1.5 if recomputes else 1.0) if layout.four_bits else 0.0
    return HOST_STEP_S + layout.num_micro * shape.layers * block


def flops_per_token(shape: ModelShape, length: int) -> float:
    """Forward and backward, causal attention: the trainer's convention."""
    return 6.0 * shape.matmul_parameters + 6.0 * shape.layers * length * shape.query_width


def _matmul_s(shape: ModelShape, layout: Layout, gpu: Gpu) -> float:
    """Of one micro-batch; recomputation does the blocks' forward products again."""
    blocks = shape.layers * shape.active_block_parameters
    once = 6.0 if layout.trained is None else 4.0  # frozen weights have no gradients of their own
    again = {"full": 2.0, "attention": 2.0 * FEED_FORWARD_AGAIN}.get(layout.recompute, 0.0)
    passes = once + again
    work = passes * blocks / (FP8_FACTOR if layout.fp8 else 1.0) + once * (shape.matmul_parameters - blocks)
    return layout.tokens * work / _matmul_rate(layout, gpu)


def _matmul_rate(layout: Layout, gpu: Gpu) -> float:
    if layout.precision == "bf16" and gpu.bf16_tflops:
        return gpu.bf16_tflops * 1e12 * MATMUL_SHARE
    return gpu.fp32_tflops * 1e12 * FP32_SHARE


def _attention_s(shape: ModelShape, layout: Layout, gpu: Gpu) -> float:
    """Of one micro-batch. The backward pass of a flash kernel does 2.5 times the forward's products."""
    length = layout.length
    if layout.packed and layout.flash4:  # a mask does all the work of one document, in less time each
        length = min(length, DOCUMENT_TOKENS)
    forward_flops = 2.0 * layout.tokens * length * shape.query_width * shape.layers
    if layout.precision == "bf16" and gpu.bf16_tflops:
        measured = FLASH4_TFLOPS if layout.flash4 else CUDNN_TFLOPS
        rates = _attention_rates(measured, shape.head_dim)
        forward, backward = (rate * 1e12 * gpu.bf16_tflops / H200_BF16 for rate in rates)
    else:
        forward = backward = gpu.fp32_tflops * 1e12 * FP32_SHARE / 2
    passes = 2 if layout.recompute == "full" else 1
    return passes * forward_flops / forward + 2.5 * forward_flops / backward


def _attention_rates(measured: dict[int, tuple[float, float]], head_dim: int) -> tuple[float, float]:
    """Measured where it was, else the nearest smaller one's in proportion."""
    if head_dim in measured:
        return measured[head_dim]
    if head_dim > 128:
        return measured[128]
    forward, backward = measured[64]
    share = min(1.0, head_dim / 64)
    return forward * share, backward * share


def _elementwise_bytes(shape: ModelShape, layout: Layout) -> float:
    """Norms, rotary embedding, SwiGLU and residual sums of one micro-batch, both passes, in fused kernels."""
    d, f, q, kv = shape.width, shape.ffn_width, shape.query_width, shape.kv_width
    per_token = float(layout.element * (26 * d + 8 * f + 4 * (q + kv)))
    if layout.recompute != "none":
        per_token += layout.element * (8 * d + 3 * f + 2 * (q + kv))
    if layout.lean:  # two sums of the residual stream, three gradients of shared inputs
        per_token -= layout.element * 10 * d
    if layout.trained is not None:  # adapters: inputs read and gradients added to, outputs' gradients read
        per_token += layout.element * (4 * (2 * d + q + f) + 2 * (q + 2 * kv + 2 * d + 2 * f))
        per_token += 0.0 if layout.lean else layout.element * 2 * (q + 2 * kv + 2 * d + 2 * f)
    if not layout.compiled:
        per_token *= EAGER_FACTOR
    if layout.fp8:  # inputs and gradients of the products: read for their scale, read again, written in both layouts
        per_token += (2 * layout.element + 2) * (4 * d + 2 * q + 2 * kv + 3 * f)
    return layout.tokens * shape.layers * per_token


def _head_bytes(shape: ModelShape, layout: Layout) -> float:
    """Cross-entropy of one micro-batch: logits read twice and written once, or fp32 copies of them as well."""
    passes = 3 * layout.element if layout.fused_head else 3 * layout.element + 6 * 4
    return float(layout.tokens * shape.vocabulary * passes)


def _weight_bytes(shape: ModelShape, layout: Layout) -> float:
    """Casts and copies of the weights themselves in one micro-batch."""
    if layout.trained is not None:
        gathered = 4.0 * 2 * shape.parameters if layout.is_fsdp else 0.0
        return gathered + FOUR_BIT_TRAFFIC * layout.four_bits * (1.5 if layout.recompute == "full" else 1.0)
    if layout.is_fsdp:
        return (FSDP_BF16_BYTES if layout.bf16_weights else FSDP_COPY_BYTES) * shape.parameters
    if layout.autocast:
        return AUTOCAST_BYTES * shape.parameters
    return 10.0 * shape.parameters if layout.num_micro > 1 else 0.0  # bf16 gradients added to fp32 sums


def _optimizer_s(shape: ModelShape, layout: Layout, bandwidth: float) -> float:
    """One pass for the norm, one that reads gradient, weight and moments and writes the last two back."""
    mine = (shape.parameters if layout.trained is None else layout.trained) / (layout.shards * layout.tensor)
    if layout.cpu_offload:  # a fused AdamW on the host, and gradients and weights over its link
        return mine * (8.0 / (HOST_LINK_GB_S * 1e9) + 28.0 / 50e9)
    per_parameter = 2 * 2 + 24 + 2 if layout.bf16_weights and layout.num_micro == 1 else 2 * 4 + 24 + 2
    return mine * per_parameter / bandwidth


def _communication_s(shape: ModelShape, layout: Layout, hardware: Hardware) -> float:
    """Of one step: weights gathered for each pass of each micro-batch, gradients scattered after each."""
    if layout.ranks == 1:
        return 0.0
    count = float(shape.parameters)
    if layout.sharding == "ddp":
        return _collective_s(2 * 4.0 * count, layout.ranks, hardware.nodes, hardware)
    together = layout.shards * layout.tensor
    group_nodes = hardware.nodes if layout.sharding == "full" else max(1, -(-together // hardware.gpus_per_node))
    gathers = layout.num_micro * (2 if layout.reshard else 1)
    seconds = _collective_s(
        (gathers * layout.element + 4.0 * layout.num_micro) * count,
        layout.shards,
        group_nodes,
        hardware,
        rings=layout.tensor,
    )
    if layout.copies > 1:  # hybrid: shards of the gradient are summed across the groups, all ranks of a node at once
        seconds += _collective_s(2 * 4.0 * count / together, layout.copies, hardware.nodes, hardware)
    return seconds


def _exchange_s(shape: ModelShape, layout: Layout, hardware: Hardware) -> float:
    """Of one micro-batch: activations among the ranks that compute it together. Nothing is computed meanwhile."""
    again = layout.recompute != "none"
    tokens, element, seconds = layout.tokens, layout.element, 0.0
    if layout.tensor > 1:  # the residual stream, gathered before and scattered after each half of a block, both ways
        halves = 1 if shape.expert_parameters else 2
        moved = halves * (4 + (1.5 if again else 0)) * element * shape.width * tokens
        seconds += _between_s(moved, layout.tensor, 1, hardware)
    if layout.context > 1:  # keys and values of all, and their gradients back
        moved = (3 if again else 2) * element * 2 * shape.kv_width / layout.tensor * tokens * layout.context
        seconds += _between_s(moved, layout.context, layout.tensor, hardware)
    if layout.expert > 1:  # every token to its experts and back, both ways
        moved = (6 if again else 4) * shape.experts_met * element * shape.width * tokens / layout.tensor
        seconds += _between_s(moved, layout.expert, 1, hardware)
    return shape.layers * seconds


def _between_s(size: float, ranks: int, stride: int, hardware: Hardware) -> float:
    """`size` bytes gathered by every rank of a group: over links where it lies in one node, else over its network."""
    within = ranks * stride <= hardware.gpus_per_node
    rate = hardware.link_gb_s if within else hardware.network_gb_s / hardware.gpus_per_node
    return size * (ranks - 1) / ranks / (rate * 1e9 * LINK_SHARE)


def _collective_s(size: float, ranks: int, nodes: int, hardware: Hardware, *, rings: int = 1) -> float:
    """Ring gathers or scatters of `size` bytes in all: over every GPU's link, and over every node's network.

    With `rings` each GPU has to do with its part of them alone, the node's network with all.
    """
    inside = size / rings * (ranks - 1) / ranks / (hardware.link_gb_s * 1e9)
    between = size * (nodes - 1) / nodes / (hardware.network_gb_s * 1e9)
    return max(inside, between) / LINK_SHARE
