"""What will happen on given hardware: memory, speed, hours and dollars of a run together. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.catalog.models import known_config
from windlass.errors import UserError
from windlass.plan.checks import TooFewSequencesError, check
from windlass.plan.cost import STORAGE_GB_S, CostEstimate, estimate_cost
from windlass.plan.failures import FailurePlan, plan_failures
from windlass.plan.fitting import batch_shape, check_fits
from windlass.plan.layout import Layout
from windlass.plan.memory import GIB, RESERVE, MemoryEstimate, estimate_memory
from windlass.plan.shape import ModelShape
from windlass.plan.speed import DEFAULT_NETWORK_GBPS, DOCUMENT_TOKENS, Hardware, SpeedEstimate, estimate_speed
from windlass.spec import Run


@dataclass(frozen=True)
class Forecast:
    hardware: Hardware
    layout: Layout
    memory: MemoryEstimate
    speed: SpeedEstimate
    cost: CostEstimate
    failures: FailurePlan | None  # None: a step is too short to say
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        gpu, instance, cost = self.hardware.gpu, self.hardware.instance, self.cost
        return {
            "hardware": {
                "gpu": gpu.name,
                "instance": instance.type if instance else None,
                "nodes": self.hardware.nodes,
                "gpus_per_node": self.hardware.gpus_per_node,
            },
            "ranks": self.layout.ranks,
            "sharding": self.layout.sharding,
            "micro_batch": self.layout.micro,
            "micro_batches": self.layout.num_micro,
            "memory": {
                "peak_gib": self.memory.peak_gib,
                "gpu_gib": gpu.memory_gib,
                "share": self.memory.peak_gib / gpu.memory_gib,
                "fullest_at": self.memory.moment,
                "items_gib": {name: size / GIB for name, size in self.memory.items},
                "host_gib_per_node": self.memory.host_bytes * self.hardware.gpus_per_node / GIB,
            },
            "speed": {
                "launch_bound": self.speed.launch_bound,
                "step_s": self.speed.step_s,
                "tokens_per_s": self.speed.tokens_per_s,
                "tokens_per_s_per_gpu": self.speed.tokens_per_s / self.layout.ranks,
                "mfu": self.speed.mfu,
                "parts_s": dict(self.speed.parts),
            },
            "hours": cost.seconds / 3600,
            "checkpoint_stall_s": cost.checkpoint_s,
            "validation_s": cost.validation_s,
            "usd": cost.usd,
            "spot_usd": cost.spot_usd,
            "usd_per_node_hour": cost.on_demand.usd_per_hour if cost.on_demand else None,
            "price_region": cost.on_demand.region if cost.on_demand else None,
            "price_date": cost.on_demand.date if cost.on_demand else None,
            "goodput": self.failures.as_dict() if self.failures else None,
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
        }


def check_on(run: Run, world_size: int, hardware: Hardware | None) -> None:
    """`check`, whose answer to too few sequences is a layout that needs fewer, where the run does not fit either."""
    try:
        check(run, world_size)
    except TooFewSequencesError:
        if hardware is not None:
            forecast(run, hardware)
        raise


def forecast(run: Run, hardware: Hardware) -> Forecast | None:
    """Of a resolved, checked run. Raises UserError where it cannot work; None for models whose layout is not known."""
    check_precision(run, hardware)
    shape = ModelShape.of(known_config(run.model))
    if shape is None:
        return None
    micro, _ = batch_shape(run, hardware.ranks, hardware.gpu)
    arranged = Layout.planned(run, hardware.ranks, micro, shape, hardware.gpu)
    memory = estimate_memory(shape, arranged)
    check_fits(run, hardware, shape, arranged, memory)
    check_host(run, hardware, shape, memory)
    speed = estimate_speed(shape, arranged, hardware, global_batch=run.train.global_batch)
    cost = estimate_cost(run, shape, arranged, speed, hardware)
    failures = None
    if not speed.launch_bound:
        failures = plan_failures(run, shape, arranged, speed, hardware, run_s=cost.seconds)
    return Forecast(
        hardware=hardware,
        layout=arranged,
        memory=memory,
        speed=speed,
        cost=cost,
        failures=failures,
        assumptions=tuple(_assumptions(run, hardware, arranged, failures)),
        warnings=tuple(_warnings(run, memory, hardware, shape)),
    )


def check_precision(run: Run, hardware: Hardware) -> None:
    if run.train.precision == "bf16" and hardware.gpu.bf16_tflops is None:
        raise UserError(
            f"the {hardware.gpu.name} has no bf16 units",
            evidence=hardware.gpu.source,
            fix="train.precision=fp32    or a GPU of the Ampere generation or later",
        )


def check_host(run: Run, hardware: Hardware, shape: ModelShape, memory: MemoryEstimate) -> None:
    instance = hardware.instance
    if instance is None or not memory.host_bytes:
        return
    needed = memory.host_bytes * hardware.gpus_per_node / GIB
    if needed > instance.ram_gib:
        nodes = hardware.nodes * -(-needed // instance.ram_gib)
        raise UserError(
            f"the offloaded state does not fit: {needed:.0f} GiB per node, {instance.type} has {instance.ram_gib} GiB",
            evidence=f"{shape.parameters:,} parameters × 16 bytes on {_nodes(hardware.nodes)}",
            fix=f"resources.nodes={nodes:.0f}" if nodes <= run.train.global_batch else None,
        )


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


def _assumptions(run: Run, hardware: Hardware, layout: Layout, failures: FailurePlan | None) -> list[str]:
    instance = hardware.instance
    assumptions = ["no failures or restarts, data never waits, start and compilation (minutes) not counted"]
    if failures is not None and failures.is_worth_saying:
        assumptions.append(
            "for goodput alone: failures as often as Llama 3's, a spare node in place of each that is lost"
        )
    if instance and instance.on_demand:
        price = instance.on_demand
        assumptions.append(f"${price.usd_per_hour:,.2f} per node and hour: on demand, {price.region}, {price.date}")
        if hardware.gpus_per_node < instance.gpus:
            assumptions.append(f"the whole {instance.type} is paid for, with {instance.gpus} GPUs")
    elif instance:
        assumptions.append(
            f"no on-demand price of {instance.type} is known" + (f": {instance.note}" if instance.note else "")
        )
    else:
        assumptions.append("no price: give --instance or resources.instance")
    if instance and instance.uncertain:
        assumptions.append(f"the sources on {instance.type} disagree on its {', '.join(instance.uncertain)}")
    if hardware.nodes > 1 and (instance is None or instance.network_gbps is None):
        assumptions.append(f"{DEFAULT_NETWORK_GBPS:.0f} Gbit/s between nodes")
    if layout.flash4:
        assumptions.append(
            "flash-attn-4 is installed where it trains (`pip install 'windlass[flash]'`), or model.attention=sdpa"
        )
    if layout.flash4 and layout.packed and layout.length > DOCUMENT_TOKENS:
        assumptions.append(f"packed documents of about {DOCUMENT_TOKENS:,} tokens: longer ones take more time")
    if hardware.gpu.name != "H200":
        assumptions.append(
            f"speed scaled from the H200 by the {hardware.gpu.name}'s peak and bandwidth; not measured on it"
        )
    if hardware.ranks > 1:
        assumptions.append("communication is modelled, not measured")
    if not run.checkpoint.background:
        assumptions.append(f"checkpoints are written at {STORAGE_GB_S:.0f} GB/s per node")
    return assumptions


def _warnings(run: Run, memory: MemoryEstimate, hardware: Hardware, shape: ModelShape) -> list[str]:
    warnings = []
    share = memory.peak_gib / hardware.gpu.memory_gib
    if share > 1 - RESERVE:
        warnings.append(f"{share:.0%} of the GPU's memory: the estimate may be off by 10 %, so it may not fit")
    if shape.family == "mixtral":
        warnings.append("mixture of experts: activations and speed are rough, routing is taken as even")
    return warnings
