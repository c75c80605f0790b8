"""What a run will need and cost, before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.api.preparation import hardware_of, memory_on_cpus
from windlass.api.schemas.runs import Plan
from windlass.catalog.gpus import gpu
from windlass.catalog.instances import instance
from windlass.data.checks import check_data
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.plan.description import describe
from windlass.plan.forecast import Forecast, check_on, forecast
from windlass.plan.speed import Hardware
from windlass.spec import Run
from windlass.targets import target
from windlass.targets.protocol import world_size


@dataclass(frozen=True)
class Planned:
    run: Run  # resolved
    model: Plan
    expected: Forecast | None
    rows: list[tuple[str, str]]  # what it will do, for a person
    warnings: list[str]  # of the data


def planned(requested: Run, gpu_name: str | None = None) -> Planned:
    """Settle, resolve, check and estimate a run. UserError, with a change that works, for what cannot work or fit."""
    run, hardware = _settle(requested, gpu_name)
    run = resolve(run)
    num_ranks = hardware.ranks if hardware else world_size(run)
    check_on(run, num_ranks, hardware)
    warnings = check_data(run)
    if gpu_name and requested.resources.gpus_per_node is None and run.resources.nodes > 1:
        nodes = run.resources.nodes
        warnings.append(f"planned for {nodes} GPUs, 1 on each of {nodes} nodes; for 8 each: resources.gpus_per_node=8")
    expected = forecast(run, hardware) if hardware else None
    rows = describe(run, num_ranks, hardware.gpu if hardware else None)
    on_cpus = memory_on_cpus(run, target(run.target), num_ranks)
    if on_cpus:
        rows.append(("memory", on_cpus))
    values = expected.as_dict() if expected else {"unknown": _why_unknown(run, hardware), "ranks": num_ranks}
    every_warning = [*warnings, *(expected.warnings if expected else ())]
    model = Plan.model_validate(
        {"unknown": None, **values, "name": run.name, "warnings": every_warning, "resolved": run}
    )
    return Planned(run, model, expected, rows, warnings)


def _settle(run: Run, gpu_name: str | None) -> tuple[Run, Hardware | None]:
    """The run with its GPUs counted, and what they are; None where it trains on CPUs."""
    resources = run.resources
    if resources.gpus_per_node == 0 and (gpu_name or resources.instance):
        raise UserError(
            f"resources.gpus_per_node is 0: the run trains on CPUs, not on {gpu_name or resources.instance}",
            fix="resources.gpus_per_node=1",
        )
    if gpu_name:
        hardware = Hardware(gpu(gpu_name), resources.gpus_per_node or 1, resources.nodes)
    elif resources.instance:
        kind = instance(resources.instance)
        count = resources.gpus_per_node or kind.gpus
        if count > kind.gpus:
            raise UserError(
                f"resources.gpus_per_node is {count} but a {kind.type} has {kind.gpus}",
                fix=f"resources.gpus_per_node={kind.gpus}",
            )
        hardware = Hardware(kind.gpu, count, resources.nodes, kind)
    else:
        where = target(run.target)
        run = where.settle(run)
        return run, hardware_of(run, where)
    counted = {"gpus_per_node": hardware.gpus_per_node, "processes_per_node": None}
    return run.model_copy(update={"resources": resources.model_copy(update=counted)}), hardware


def _why_unknown(run: Run, hardware: Hardware | None) -> str:
    if hardware is None:
        return "no GPU is known: give --gpu H200 or --instance p5.48xlarge"
    return f"the layout of {run.model.label} is not known before it is built"
