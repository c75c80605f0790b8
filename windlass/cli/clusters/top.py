"""`windlass top`: what the pods of a run are busy with."""

from __future__ import annotations

import time
from typing import Any

import click

from windlass.cli.jobs import on_option, run_names


@click.command(short_help="Show what every pod of a run uses.")
@click.argument("name", shell_complete=run_names)
@click.option("--every", type=click.FloatRange(min=1.0), metavar="SECONDS", help="Again and again, until Ctrl-C.")
@on_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; with --every, one per line.")
def top(name: str, every: float | None, place: str | None, as_json: bool) -> int | None:
    """Show what every pod of a run uses.

    GPUs (nvidia-smi), memory and processors (its cgroup), step and tokens/s, asked in the pods themselves.
    """
    from windlass.cli.clusters.clusters import find_on_cluster
    from windlass.errors import ExitCode

    target, job = find_on_cluster(name, place)
    try:
        while True:
            _look(target, job, as_json=as_json, again=every is not None)
            if every is None:
                return None
            time.sleep(every)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _look(target: Any, job: Any, *, as_json: bool, again: bool) -> None:
    from windlass.cli.clusters.clusters import pod_scripts_of
    from windlass.cli.output import count, number, print_json, print_json_line, print_table
    from windlass.errors import UserError
    from windlass.targets.kubernetes.pod_scripts import of_each

    status = target.status(job)
    pods, scripts = pod_scripts_of(target, job)
    rows: list[dict[str, Any]] = []
    for pod, (_, answer) in zip(pods, of_each(scripts, lambda script: script.ask("usage")), strict=True):
        use = {"error": answer.what} if isinstance(answer, UserError) else answer
        rows.append({"pod": pod.name, "node": pod.node, "node_rank": pod.node_rank, **use})
    # all ranks go in step: each pod has its part of what the run does
    share = status.tokens_per_s / len(pods) if status.tokens_per_s else None
    if as_json:
        summary = {"step": status.step, "steps": status.steps, "tokens_per_s": status.tokens_per_s}
        result = {"name": job.name, **summary, "pods": [{**row, "tokens_per_s": share} for row in rows]}
        print_json_line(result) if again else print_json(result)
        return
    click.echo(
        f"{job.name}: {status.state}, step {status.step or '–'}/{status.steps or '–'}, loss {number(status.loss)}, "
        f"{count(status.tokens_per_s)} tokens/s"
    )
    print_table(
        ["POD", "NODE", "GPU", "GPU MEMORY", "MEMORY", "CPUS", "STEP", "TOK/S"],
        [
            [
                row["pod"],
                row["node"],
                *_gpu_cells(row.get("gpus") or []),
                row.get("error") or _memory(row.get("memory"), row.get("memory_limit")),
                number(row.get("cpus"), 1),
                str(status.step or "–"),
                count(share),
            ]
            for row in rows
        ],
    )


def _gpu_cells(gpus: list[dict[str, Any]]) -> tuple[str, str]:
    if not gpus:
        return "–", "–"
    busy = " ".join(f"{gpu['busy']}%" if gpu["busy"] is not None else "–" for gpu in gpus)
    used = sum(gpu["memory_mib"] or 0 for gpu in gpus) / 1024
    total = sum(gpu["memory_total_mib"] or 0 for gpu in gpus) / 1024
    return busy, f"{used:.0f}/{total:.0f} GiB"


def _memory(used: int | None, limit: int | None) -> str:
    if used is None:
        return "–"
    return f"{used / 2**30:.1f}" + (f"/{limit / 2**30:.0f} GiB" if limit else " GiB")
