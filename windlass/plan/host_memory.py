"""Memory of a run that trains on CPUs: what it holds all the time, and so needs at least."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.catalog.models import known_config
from windlass.errors import UserError
from windlass.plan.lora import four_bit_parameters, trained_parameters
from windlass.plan.memory import FOUR_BIT_BYTES, GIB
from windlass.plan.resolution import effective_sharding
from windlass.plan.shape import ModelShape
from windlass.spec import Run

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
        one: float = shape.parameters * TRAINED_BYTES
        evidence = f"{shape.parameters:,} parameters × {TRAINED_BYTES} bytes: weight, gradient, two moments of AdamW"
    else:
        packed = four_bit_parameters(run, shape)
        element = 2 if run.train.precision == "bf16" else 4
        one = (shape.parameters - packed) * element + packed * FOUR_BIT_BYTES + trained * TRAINED_BYTES
        evidence = f"{shape.parameters:,} frozen parameters and {trained:,} that train"
    if sharding == "full":
        one /= run.resources.nodes
    return HostMemory(one * copies, ranks, copies, evidence + (f", {copies} copies of them" if copies > 1 else ""))


def check_host_memory(run: Run, world_size: int, memory_bytes: int) -> HostMemory | None:
    """Raise UserError for a run on CPUs that cannot fit into its machine's memory."""
    needed = host_memory(run, world_size)
    if needed is None or needed.bytes <= memory_bytes:
        return needed
    fix = "a smaller model, or a machine with more memory"
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
