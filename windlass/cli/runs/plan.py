"""`windlass plan`: what a run will need and cost, before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from windlass.cli.jobs import complete_gpu, json_option, nodes_option, overrides_argument, placed, run_file_argument
from windlass.cli.output import duration, print_json, print_pairs, warn, wrapped
from windlass.errors import ExitCode, UserError

if TYPE_CHECKING:
    from windlass.plan.failures import FailurePlan
    from windlass.plan.forecast import Forecast


@click.command(short_help="Say what a run will need and cost.")
@run_file_argument
@overrides_argument
@click.option(
    "--gpu", "gpu_name", metavar="GPU", shell_complete=complete_gpu, help="Plan for this GPU, for example H200."
)
@click.option(
    "--instance", "instance_name", metavar="TYPE", help="Plan for this instance type; sets resources.instance."
)
@nodes_option
@json_option
def plan(
    run_file: str,
    overrides: tuple[str, ...],
    gpu_name: str | None,
    instance_name: str | None,
    nodes: int | None,
    as_json: bool,
) -> int:
    """Say what a run will need and cost.

    Ranks, memory of every GPU, tokens per second, hours and dollars. Nothing is started. Exit code 2, with a change
    that works, where the run cannot work or will not fit. Without --gpu or --instance: the instance of the run file,
    else the GPUs of this machine.
    """
    from windlass.api.planning import planned
    from windlass.spec import load_run

    if gpu_name and instance_name:
        raise UserError("give either --gpu or --instance, and not both", fix=f"--instance {instance_name}")
    changes = [*overrides, *placed(None, nodes)]
    if instance_name:
        changes.append(f"resources.instance={instance_name}")
    result = planned(load_run(run_file, changes), gpu_name)
    if as_json:
        print_json(result.model)
    else:
        _print(result.run.name, result.rows, result.expected, result.model.unknown)
    for warning in result.warnings:
        warn(warning)
    return ExitCode.OK


def _print(name: str, rows: list[tuple[str, str]], expected: Forecast | None, unknown: str | None) -> None:
    if expected is None:
        print_pairs([("run", name), *rows, ("memory, speed", f"not estimated: {unknown}")])
        return
    print_pairs([("run", name), *rows, *_rows(expected)])
    for assumption in expected.assumptions:
        click.echo(wrapped(f"assumes: {assumption}", "  "))
    for warning in expected.warnings:
        warn(warning)


def _rows(expected: Forecast) -> list[tuple[str, str]]:
    from windlass.plan.memory import GIB

    memory, speed, cost, gpu = expected.memory, expected.speed, expected.cost, expected.hardware.gpu
    if speed.launch_bound:
        note = "not estimated: a step this small is bound by the host, which launches kernels, not by the GPU"
        peak = f"{memory.peak_gib * 1024:,.0f} MiB of {gpu.memory_gib:.1f} GiB per GPU"
        return [("hardware", expected.hardware.describe()), ("memory", peak), ("speed, time, cost", note)]
    share = memory.peak_gib / gpu.memory_gib
    items = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.items)
    parts = ", ".join(f"{part} {seconds / speed.step_s:.0%}" for part, seconds in speed.parts)
    per_gpu = f", {speed.tokens_per_s / expected.layout.ranks:,.0f} per GPU" if expected.layout.ranks > 1 else ""
    rows = [
        ("hardware", expected.hardware.describe()),
        ("memory", f"{memory.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB per GPU ({share:.0%}), at the {memory.moment}"),
        ("", items),
        ("speed", f"{speed.tokens_per_s:,.0f} tokens/s{per_gpu}; {duration(speed.step_s)} a step, MFU {speed.mfu:.0%}"),
        ("", parts),
        (
            "time",
            duration(cost.seconds) + (f", {duration(cost.checkpoint_s)} of it saving" if cost.checkpoint_s else ""),
        ),
        ("cost", _price(expected)),
        *_failure_rows(expected.failures),
    ]
    if memory.host_bytes:
        total = memory.host_bytes * expected.hardware.gpus_per_node / GIB
        rows.insert(3, ("host memory", f"{total:.1f} GiB per node for the offloaded state"))
    return rows


def _failure_rows(failures: FailurePlan | None) -> list[tuple[str, str]]:
    """Nothing for a run so small that it will hardly meet one."""
    if failures is None or not failures.is_worth_saying:
        return []
    often = f"{failures.number:,.0f} failures expected, one every {duration(failures.between_s)}"
    rows = [("goodput", f"{failures.as_is.goodput:.1%}: {often}")]
    gain = failures.with_proposal.goodput - failures.as_is.goodput
    if gain > 0.001:
        settings = " ".join(f"checkpoint.{name}={every}" for name, every in failures.proposed.items())
        rows.append(("", f"{failures.with_proposal.goodput:.1%} with {settings}"))
    return rows


def _price(expected: Forecast) -> str:
    cost = expected.cost
    spot = (
        f"; ${cost.spot_usd:,.2f} at the lowest spot price ({cost.spot.region})"
        if cost.spot and cost.spot_usd is not None
        else ""
    )
    known = "unknown" if cost.usd is None else f"${cost.usd:,.2f}"
    return f"{known} for {cost.node_hours:,.2f} node-hours{spot}"
