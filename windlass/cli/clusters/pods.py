"""Commands on the pods of a run: exec, top, debug, sync; and the checkpoints that pods have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from windlass.api.lookup import find
from windlass.cli.jobs import json_option, on_option, run_names
from windlass.cli.output import count, number, print_json, print_json_line, print_table
from windlass.errors import ExitCode, UserError
from windlass.targets.protocol import KeepsRunFolder, RunsInPods

if TYPE_CHECKING:
    from windlass.checkpoint import Checkpoint
    from windlass.targets.kubernetes.client import KubernetesTarget
    from windlass.targets.kubernetes.pod_scripts import PodScripts
    from windlass.targets.kubernetes.watch.pods import Pod
    from windlass.targets.protocol import JobRef


@click.command(
    "exec",
    short_help="Run a command where a rank runs.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@on_option
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="NAME [RANK] -- COMMAND...", required=True)
def exec_command(words: tuple[str, ...], place: str | None) -> int:
    """Run a command where a rank runs.

    In its pod, with this terminal or this input; rank 0 by default. The exit code is the command's:
    `windlass exec my 3 -- nvidia-smi`.
    """
    name, rank, command = _split(words)
    target, job = find(name, place)
    if not isinstance(target, RunsInPods):
        raise UserError(
            f"{name} is on the target {job.target}, where commands are run without windlass",
            fix="on its machine, in a shell of your own; windlass logs shows what ranks say",
        )
    return target.exec(job, rank, command)


def _split(words: tuple[str, ...]) -> tuple[str, int, list[str]]:
    name, rest = words[0], list(words[1:])
    rank = 0
    if rest and rest[0].isdecimal():
        rank = int(rest.pop(0))
    if rest and rest[0] == "--":
        rest.pop(0)
    if not rest:
        raise UserError("it is not said which command", fix=f"windlass exec {name} {rank} -- nvidia-smi")
    return name, rank, rest


@click.command(short_help="Show what every pod of a run uses.")
@click.argument("name", shell_complete=run_names)
@click.option("--every", type=click.FloatRange(min=1.0), metavar="SECONDS", help="Again and again, until Ctrl-C.")
@on_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; with --every, one per line.")
def top(name: str, every: float | None, place: str | None, as_json: bool) -> int | None:
    """Show what every pod of a run uses.

    GPUs (nvidia-smi), memory and processors (its cgroup), step and tokens/s, asked in the pods themselves.
    """
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


@click.command(short_help="Measure the network between the pods of a run.")
@click.argument("name", shell_complete=run_names)
@on_option
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
def debug(name: str, place: str | None, as_json: bool) -> int:
    """Measure the network between the pods of a run.

    Every pod looks up the meeting place in DNS and connects to its port; then each sends to the next for a second.
    Exit code 1 if anything failed.
    """
    from windlass.targets.kubernetes.manifests.environment import host_name
    from windlass.targets.kubernetes.network import bandwidths, names_and_port
    from windlass.targets.kubernetes.pod.interface import COORDINATOR_PORT

    target, job = find_on_cluster(name, place)
    run = job.folder.load_run()
    pods, scripts = pod_scripts_of(target, job)
    findings = names_and_port(scripts, host_name(run), run.target.port or COORDINATOR_PORT)
    findings += bandwidths(scripts, [pod.address for pod in pods])
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = [
            [finding.check, finding.origin, finding.destination, "ok" if finding.ok else "FAILED", finding.said]
            for finding in findings
        ]
        print_table(["CHECK", "FROM", "TO", "", "RESULT"], rows)
    return ExitCode.OK if all(finding.ok for finding in findings) else ExitCode.FAILED


@click.command(short_help="Send changed code to a run's pods.")
@click.argument("name", shell_complete=run_names)
@on_option
@click.option(
    "--code", "folder", metavar="FOLDER", help="The folder to send. Default: the one it was submitted with here."
)
@json_option
def sync(name: str, place: str | None, folder: str | None, as_json: bool) -> None:
    """Send changed code to a run's pods.

    The folder of target.kubernetes.code is packed again and replaces what the job carries; the ranks save, and start
    anew with it. No new image, no new pods. A run that was submitted from another machine needs --code: its run file
    comes from the cluster, and does not choose a folder of this one.
    """
    from windlass.targets.kubernetes.manifests.request import with_options
    from windlass.targets.kubernetes.syncing import folder_to_send
    from windlass.targets.kubernetes.syncing import sync as send

    target, job = find_on_cluster(name, place)
    api, cluster_job = target.cluster(job)
    run = job.folder.load_run()
    folder = folder_to_send(cluster_job, run, folder)
    pods, scripts = pod_scripts_of(target, job)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if not as_json:
            click.echo(text)

    changed = send(api, cluster_job, run, folder, scripts[0], [pod.name for pod in pods], say)
    if changed:
        target.note_new_code(job, with_options(run, code=folder))
    if as_json:
        print_json({"name": name, "changed": changed, "said": said})
    elif not changed:
        click.echo(f"the pods of {name} have this code already")


def find_on_cluster(name: str, place: str | None) -> tuple[KubernetesTarget, JobRef]:
    target, job = find(name, place)
    if not isinstance(target, RunsInPods):
        raise UserError(f"{name} is on the target {job.target}, which has no pods", fix=f"windlass show {name}")
    return cast("KubernetesTarget", target), job


def keeper_of_checkpoints(name: str, tier: str | None) -> tuple[KeepsRunFolder, JobRef] | None:
    """Who has the checkpoints of a run that was not trained on this machine's file systems, if that tier is asked."""
    if tier not in (None, "cluster"):
        return None
    target, job = find(name)
    if isinstance(target, KeepsRunFolder):
        run = job.folder.load_run()
        # pods with disks of their own have no run folder to speak of; a store then has what is worth having
        elsewhere = tier is None and run.target.kubernetes.storage == "none" and run.checkpoint.store
        return None if elsewhere else (target, job)
    if tier is None:
        return None
    raise UserError(f"{name} is on the target {job.target}, and not in a cluster", fix=f"windlass ckpt ls {name}")


def rows_in_cluster(name: str, tier: str | None) -> list[dict[str, Any]]:
    keeper = keeper_of_checkpoints(name, tier)
    return list(keeper[0].checkpoints(keeper[1])) if keeper else []


def fetch_from_cluster(name: str, step: int | None, tier: str | None, to: Path | None) -> Checkpoint | None:
    keeper = keeper_of_checkpoints(name, tier)
    return keeper[0].fetch_checkpoint(keeper[1], step, to or keeper[1].folder.checkpoints) if keeper else None


def pod_scripts_of(target: KubernetesTarget, job: JobRef) -> tuple[Sequence[Pod], list[PodScripts]]:
    """The running pods of a job, and a way to ask each of them something."""
    from windlass.targets.kubernetes.pod_scripts import PodScripts

    api, cluster_job, pods = target.running_pods(job)
    python = job.folder.load_run().target.kubernetes.python
    container = cluster_job.layout.container
    return pods, [PodScripts(api, cluster_job.namespace, pod.name, container, python) for pod in pods]
