"""How many parameters LoRA adds to a decoder whose layout is known, and how many weights it freezes in 4 bits."""

from __future__ import annotations

from windlass.plan.shape import ModelShape
from windlass.spec import Run


def projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """The linear layers of a block: inputs and outputs by name. Experts are no linear layers of their own."""
    d, f, q, kv = shape.width, shape.ffn_width, shape.query_width, shape.kv_width
    attention = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
    if shape.family == "mixtral":
        return attention
    return {**attention, "gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}


def targets(run: Run, shape: ModelShape) -> list[tuple[int, int]]:
    """Of one block. Patterns that name more than a layer's last name are taken to mean all: an estimate, never less."""
    lora = run.model.lora
    there = projections(shape)
    named = [name for name in lora.targets or () if name in there] if lora else []
    if not named or len(named) < len(lora.targets or () if lora else ()):
        return list(there.values())
    return [there[name] for name in named]


def trained_parameters(run: Run, shape: ModelShape) -> int | None:
    """Parameters of the adapters and of added tokens' rows; None where the whole model trains."""
    lora = run.model.lora
    if lora is None:
        return None
    rank = lora.rank or 0
    adapters = shape.layers * sum(rank * (inputs + outputs) for inputs, outputs in targets(run, shape))
    rows = len(run.data.special_tokens) * shape.width * (1 if shape.tied else 2)
    return adapters + rows


def four_bit_parameters(run: Run, shape: ModelShape) -> int:
    lora = run.model.lora
    if lora is None or lora.quantize is None:
        return 0
    return shape.layers * sum(inputs * outputs for inputs, outputs in targets(run, shape))
