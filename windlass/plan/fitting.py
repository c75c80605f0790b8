"""Make a run fit: the micro-batch where it is open, and changes of a run that does not fit. Tried by the estimator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from windlass.catalog.gpus import Gpu
from windlass.catalog.instances import instance
from windlass.catalog.models import known_config
from windlass.errors import UserError
from windlass.plan.checks import check
from windlass.plan.layout import Facts, Layout, effective_sharding, rows_per_rank
from windlass.plan.memory import (
    GIB,
    PROCESS_BYTES,
    RESERVE,
    HostMemory,
    MemoryEstimate,
    estimate_memory,
    host_memory,
)
from windlass.plan.shape import ModelShape
from windlass.plan.speed import Hardware, estimate_speed
from windlass.spec import Run
from windlass.spec.loading import apply_override, parse_run

MOST_RANKS = 4096
LARGEST_CONTEXT = 16
USUAL_INSTANCE = "p5.48xlarge"  # proposed to a run that does not fit into a machine without GPUs
MOST_UNSEEN = 8  # sequences of a micro-batch on hardware that is not known


@dataclass(frozen=True)
class Change:
    """Overrides that make a run fit, and what they cost."""

    overrides: tuple[str, ...]
    hardware: Hardware
    peak_gib: float
    tokens_per_s: float

    def __str__(self) -> str:
        return " ".join(self.overrides)

    @property
    def cost(self) -> str:
        return f"({self.peak_gib:.1f} GiB, about {self.tokens_per_s:,.0f} tokens/s)"


def batch_shape(
    run: Run,
    world_size: int,
    gpu: Gpu | None = None,
    shape: ModelShape | None = None,
    facts: Facts | None = None,
) -> tuple[int, int]:
    """(micro-batch, micro-batches per step) of every rank. The last rows may be padding that counts for nothing.

    `shape` and `facts` are those of a model which is not known without asking a hub.
    """
    rows = rows_per_rank(run, world_size)
    micro = run.train.micro_batch
    if micro is None and gpu is not None:
        micro = choose_micro_batch(run, world_size, gpu, shape, facts)
    micro = min(micro or MOST_UNSEEN, rows)
    return micro, -(-rows // micro)


def choose_micro_batch(
    run: Run, world_size: int, gpu: Gpu, shape: ModelShape | None = None, facts: Facts | None = None
) -> int:
    """The largest divisor of a rank's sequences that fits into the GPU with a reserve; 1 where none does."""
    rows = rows_per_rank(run, world_size)
    shape = shape or ModelShape.of(known_config(run.model))
    if shape is None:
        return min(rows, MOST_UNSEEN)
    return _largest_fitting(run, world_size, gpu, shape, _divisors(rows), facts) or 1


def comfortable_bytes(gpu: Gpu) -> float:
    """What a plan may fill: the rest is for CUDA's context, NCCL's buffers and fragmentation."""
    return gpu.memory_gib * GIB * (1 - RESERVE)


def check_fits(run: Run, hardware: Hardware, shape: ModelShape, layout: Layout, memory: MemoryEstimate) -> None:
    """Raise UserError, with the change that fits, where the peak is more than the GPU has."""
    gpu = hardware.gpu
    if memory.peak_gib <= gpu.memory_gib:
        return
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.items[:4])
    change = find_change(run, hardware, shape)
    raise UserError(
        f"the run does not fit: {memory.peak_gib:.1f} GiB per rank, {gpu.name} has {gpu.memory_gib:.1f} GiB",
        evidence=f"{layout.micro} × {layout.length} tokens at once, fullest at the {memory.moment}: {largest} GiB",
        cause=None if change else "no micro-batch, recomputation, layout or number of ranks that was tried fits",
        fix=f"{change}    {change.cost}" if change else None,
    )


def check_host_memory(run: Run, world_size: int, memory_bytes: int) -> HostMemory | None:
    """Raise UserError for a run on CPUs that cannot fit into its machine's memory."""
    needed = host_memory(run, world_size)
    if needed is None or needed.bytes <= memory_bytes:
        return needed
    fix = _on_gpus(run) or "a smaller model, or a machine with more memory"
    if needed.copies > 1 and needed.state_bytes / needed.copies + needed.ranks * PROCESS_BYTES <= memory_bytes:
        fix = "parallel.sharding=full    one copy of the model on all ranks together"
    elif run.model.lora is None and run.model.init == "pretrained":
        fix = "model.lora.rank=16    trains adapters beside the frozen model"
    raise UserError(
        f"the run needs at least {needed.bytes / GIB:.1f} GiB of memory, and this machine has "
        f"{memory_bytes / GIB:.1f} GiB",
        evidence=needed.evidence,
        cause="it trains on the CPU: the model and its optimizer are in this machine's memory",
        fix=fix,
    )


def _on_gpus(run: Run) -> str | None:
    """All overrides with which a run on CPUs fits into nodes of the usual instance; None where it is not known."""
    kind, shape = instance(USUAL_INSTANCE), ModelShape.of(known_config(run.model))
    if shape is None:
        return None
    rented = (f"resources.instance={kind.type}", f"resources.gpus_per_node={kind.gpus}")
    hardware = Hardware(kind.gpu, kind.gpus, run.resources.nodes, kind)
    change = find_change(apply(run, rented), hardware, shape)
    return None if change is None else f"{' '.join((*rented, *change.overrides))}    {change.cost}"


def find_change(run: Run, hardware: Hardware, shape: ModelShape) -> Change | None:
    """The cheapest change that fits with a reserve: the fastest one on the same hardware, else the fewest GPUs."""
    same = fastest_change(run, hardware, shape)
    if same:
        return same
    for larger in _more_hardware(run, hardware):
        grown = [change for tried in _on(run, hardware, larger) if (change := _try(run, larger, shape, tried))]
        if grown:
            return max(grown, key=lambda change: change.tokens_per_s)
    offloaded = ("parallel.sharding=full", "parallel.cpu_offload=true", "parallel.activation_checkpointing=full")
    return _try(run, hardware, shape, offloaded)


def fastest_change(run: Run, hardware: Hardware, shape: ModelShape) -> Change | None:
    """On the hardware that there is; without overrides where the run fits best as it is."""
    changes = [change for tried in _same_hardware(run, hardware) if (change := _try(run, hardware, shape, tried))]
    return max(changes, key=lambda change: change.tokens_per_s, default=None)


def _same_hardware(run: Run, hardware: Hardware) -> Iterator[tuple[str, ...]]:
    spread: Sequence[tuple[str, ...]] = [()]
    if hardware.ranks > 1 and effective_sharding(run, hardware.ranks) != "full":
        spread = [(), ("parallel.sharding=full",)]
    for overrides in spread:
        yield from _arranged(run, hardware, overrides)


def _arranged(run: Run, hardware: Hardware, overrides: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """With every recomputation and every way for ranks to share sequences."""
    for split in _splits(run, hardware):
        for recompute in _recomputations(run):
            yield (*overrides, *split, *recompute)


def _splits(run: Run, hardware: Hardware) -> Iterator[tuple[str, ...]]:
    """Tensor groups within a node, and contexts of powers of two; what a run sets itself stays."""
    yield ()
    if run.model.lora is not None or hardware.ranks == 1:
        return
    tensors = [run.parallel.tensor] if run.parallel.tensor > 1 else _powers_of_two(hardware.gpus_per_node)
    contexts = [run.parallel.context] if run.parallel.context > 1 else _powers_of_two(LARGEST_CONTEXT)
    for tensor in tensors:
        for context in contexts:
            if hardware.ranks % (tensor * context) or (tensor, context) == (run.parallel.tensor, run.parallel.context):
                continue
            changed = [f"parallel.tensor={tensor}"] if tensor != run.parallel.tensor else []
            yield (*changed, *([f"parallel.context={context}"] if context != run.parallel.context else []))


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _recomputations(run: Run) -> Iterator[tuple[str, ...]]:
    """At least as much as the run has."""
    levels = ["none", "selective", "attention", "full"]
    now = levels.index(run.parallel.activation_checkpointing)
    yield ()
    for level in levels[now + 1 :]:
        yield (f"parallel.activation_checkpointing={level}",)


def _more_hardware(run: Run, hardware: Hardware) -> Iterator[Hardware]:
    """Whole nodes of an instance type; GPUs up to 8 in a node otherwise, and then nodes."""
    per_node, nodes = hardware.gpus_per_node, hardware.nodes
    fullest = hardware.instance.gpus if hardware.instance else max(8, per_node)
    while per_node * 2 <= fullest:
        per_node *= 2
        yield replace(hardware, gpus_per_node=per_node)
    while nodes * 2 * per_node <= MOST_RANKS:
        nodes *= 2
        yield replace(hardware, gpus_per_node=per_node, nodes=nodes)


def _on(run: Run, before: Hardware, after: Hardware) -> Iterator[tuple[str, ...]]:
    overrides = []
    if after.gpus_per_node != before.gpus_per_node:
        overrides.append(f"resources.gpus_per_node={after.gpus_per_node}")
    if after.nodes != before.nodes:
        overrides.append(f"resources.nodes={after.nodes}")
    if effective_sharding(run, after.ranks) != "full":
        overrides.append("parallel.sharding=full")
    yield from _arranged(run, after, tuple(overrides))


def _try(run: Run, hardware: Hardware, shape: ModelShape, overrides: tuple[str, ...]) -> Change | None:
    """The changed run with the largest micro-batch that fits, but none larger than was asked for."""
    changed = apply(run, overrides)
    rows = rows_per_rank(changed, hardware.ranks)
    requested = run.train.micro_batch
    sizes = [size for size in _divisors(rows) if requested is None or size <= requested]
    if requested is not None and requested <= rows and requested not in sizes:
        sizes.insert(0, requested)
    try:
        check(changed, hardware.ranks)
        micro = _largest_fitting(changed, hardware.ranks, hardware.gpu, shape, sizes)
    except UserError:  # what the run asks for by name cannot be had beside these overrides
        return None
    if micro is None:
        return None
    arranged = Layout.planned(changed, hardware.ranks, micro, shape, hardware.gpu)
    speed = estimate_speed(shape, arranged, hardware, global_batch=run.train.global_batch)
    chosen = () if requested is None or requested == micro else (f"train.micro_batch={micro}",)
    return Change((*chosen, *overrides), hardware, estimate_memory(shape, arranged).peak_gib, speed.tokens_per_s)


def _largest_fitting(
    run: Run, world_size: int, gpu: Gpu, shape: ModelShape, sizes: Sequence[int], facts: Facts | None = None
) -> int | None:
    limit, facts = comfortable_bytes(gpu), facts or Facts.assumed(run, shape, gpu)
    for size in sizes:
        if estimate_memory(shape, Layout.resolve(run, world_size, size, facts)).peak_bytes <= limit:
            return size
    return None


def apply(run: Run, overrides: Sequence[str]) -> Run:
    """A run with `section.key=value` overrides."""
    values = run.model_dump(mode="json")
    if any(override.startswith("resources.gpus_per_node") for override in overrides):
        values["resources"]["processes_per_node"] = None  # one rank per GPU, however many there were
    for override in overrides:
        apply_override(values, override)
    return parse_run(values)


def _divisors(number: int) -> list[int]:
    """Largest first."""
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]
