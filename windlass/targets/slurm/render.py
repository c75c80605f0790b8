"""Render a run, or a sweep of runs, as one sbatch script. Pure: runs and paths in, text out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.runfolder import RUNS_VARIABLE
from windlass.spec import Run
from windlass.spec.slurm import SlurmOptions
from windlass.targets.local.render import ATTEMPT_VARIABLE, FAULTS_VARIABLE, FOLDER_VARIABLE

HYPERPOD = "/opt/sagemaker_cluster"  # there on every node of a HyperPod Slurm cluster
MARGIN_SECONDS = 30  # beside the save itself: Slurm's clock is coarse, and ranks come to a step's end first
STRAGGLER_SECONDS = 60  # for the other nodes to end by themselves when one has


@dataclass(frozen=True)
class Place:
    """Where things are for the job: the same on every node."""

    runs: Path  # absolute
    working_directory: Path
    python: str


@dataclass(frozen=True)
class SlurmRequest:
    """The script as sbatch gets it, on its standard input."""

    script: str
    folders: tuple[Path, ...]  # one per run: an array has several
    indices: tuple[int, ...] | None  # of the array; None: a plain job
    host: str | None

    @property
    def argv(self) -> tuple[str, ...]:
        return ("sbatch", "--parsable")

    def __str__(self) -> str:
        where = f"ssh {self.host} " if self.host else ""
        return f"# {where}{shlex.join(self.argv)} < the following\n{self.script}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": "slurm",
            "argv": list(self.argv),
            "host": self.host,
            "script": self.script,
            "folders": [str(folder) for folder in self.folders],
        }


def render(run: Run, place: Place, *, faults: str | None = None) -> SlurmRequest:
    """One run as one job."""
    folder = place.runs / run.name
    log = _literal(folder / "logs") + "/slurm-%j.out"
    script = _script(run, place, folder=quote(str(folder)), log=log, faults=faults)
    return SlurmRequest(script, (folder,), None, run.target.host)


def render_sweep(
    name: str, runs: Sequence[Run], indices: Sequence[int], place: Place, *, faults: str | None = None
) -> SlurmRequest:
    """Runs that differ in a few keys as one array. The run of index 3 is called NAME-3."""
    folders = tuple(place.runs / f"{name}-{index}" for index in indices)
    base = place.runs / f"{name}-"
    script = _script(
        runs[0].model_copy(update={"name": name}),
        place,
        folder=f'{quote(str(base))}"$SLURM_ARRAY_TASK_ID"',
        log=_literal(base) + "%a/logs/slurm-%A_%a.out",
        array=",".join(map(str, indices)),
        faults=faults,
    )
    return SlurmRequest(script, folders, tuple(indices), runs[0].target.host)


def signal_lead(run: Run) -> int:
    """Seconds before the time limit at which the ranks are told to save."""
    grace = run.checkpoint.grace_seconds
    return grace + min(MARGIN_SECONDS, grace)


def time_limit(text: str) -> str:
    """A time limit as sbatch takes it: `4h` is 240 minutes, and what Slurm knows stays as it is."""
    for unit, minutes in (("min", 1), ("h", 60), ("d", 1440)):
        if text.endswith(unit):
            return str(int(text.removesuffix(unit)) * minutes)
    return text


def time_seconds(text: str) -> int | None:
    """A time limit in seconds, by Slurm's rules: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    text = time_limit(text)
    if text in ("UNLIMITED", "INFINITE"):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = (parts if len(parts) == 3 else [0, *parts, 0])[:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def quote(text: str) -> str:
    return shlex.quote(text)


def sbatch_quote(text: str) -> str:
    """A value in a #SBATCH line: sbatch reads double quotes and backslashes as a shell would, and nothing else."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' if not _is_plain(text) else text


def _is_plain(text: str) -> bool:
    return all(letter.isalnum() or letter in "-_./:,=%+@[]&|*!" for letter in text) and text != ""


def _literal(path: Path) -> str:
    """A path in a file name pattern."""
    return str(path).replace("%", "%%")


def _script(run: Run, place: Place, *, folder: str, log: str, array: str | None = None, faults: str | None) -> str:
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {option}" for option in _options(run, place, log=log, array=array)]
    lines += ["", *_environment(run, place, folder=folder, faults=faults), ""]
    lines += [*run.target.slurm.setup, ""] if run.target.slurm.setup else []
    lines += _body(run, place, is_array=array is not None)
    return "\n".join(lines) + "\n"


def _options(run: Run, place: Place, *, log: str, array: str | None) -> list[str]:
    asked, resources = run.target.slurm, run.resources
    values: list[tuple[str, str | int | None]] = [
        ("job-name", asked.job_name or run.name),
        ("array", array),
        ("nodes", resources.nodes),
        ("ntasks-per-node", 1),  # one torchrun per node
        ("cpus-per-task", cpus_per_task(run)),
        ("gpus-per-node", None if asked.gres else resources.gpus_per_node or None),
        ("gres", asked.gres),
        ("mem", asked.memory or ("0" if asked.exclusive else None)),
        ("partition", asked.partition),
        ("account", asked.account),
        ("qos", asked.qos),
        ("time", time_limit(asked.time) if asked.time else None),
        ("constraint", asked.constraint),
        ("signal", f"B:USR1@{signal_lead(run)}"),
        ("output", log),
        ("open-mode", "append"),
        ("chdir", str(place.working_directory)),
    ]
    lines = [f"--{name}={sbatch_quote(str(value))}" for name, value in values if value is not None]
    lines += ["--exclusive"] if asked.exclusive else []
    lines.append("--requeue" if asked.requeue else "--no-requeue")
    return [*lines, *asked.sbatch]


def cpus_per_task(run: Run) -> int | None:
    """Cores of a node's torchrun and ranks; with `exclusive`, all of them without asking."""
    threads = run.resources.threads_per_process
    if run.target.slurm.exclusive or threads is None:
        return None
    return threads * (run.resources.processes_per_node or 1)


def _environment(run: Run, place: Place, *, folder: str, faults: str | None) -> list[str]:
    lines = [
        f"folder={folder}",
        f"export {RUNS_VARIABLE}={quote(str(place.runs))}",
        f'export {FOLDER_VARIABLE}="$folder"',
        f"export OMP_NUM_THREADS={run.resources.threads_per_process or 1}",
        "export PYTHONUNBUFFERED=1",
    ]
    if faults:
        lines.append(f"export {FAULTS_VARIABLE}={quote(faults)}")
    return lines


def _body(run: Run, place: Place, *, is_array: bool) -> list[str]:
    asked = run.target.slurm
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if is_array else '"$SLURM_JOB_ID"'
    cpus = cpus_per_task(run)
    port = f" --port={run.target.port}" if run.target.port else ""
    here = '"$python" -m windlass.targets.slurm.attempt'
    if asked.container:
        here = f'srun --nodes=1 --ntasks=1 "${{container[@]}}" {here}'
    return f"""\
python={quote(place.python)}
{_container(asked, place)}
here=({here})
job={job}
auto_resume=()
if [ -d {HYPERPOD} ]; then auto_resume=(--auto-resume=1); fi # HyperPod replaces broken nodes itself

on_every_node='
    trap "" TERM # Slurm signals every process; only the ranks act on it, and torchrun waits while they save
    is_host=0
    if [ "$SLURMD_NODENAME" = "$WINDLASS_HEAD" ]; then is_host=1; fi
    exec "$0" -m torch.distributed.run \\
        --nnodes={run.resources.nodes} --nproc-per-node={run.resources.processes_per_node or 1} \\
        --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID.{_shell(ATTEMPT_VARIABLE)}" \\
        --rdzv-endpoint="$SLURM_LAUNCH_NODE_IPADDR:$WINDLASS_PORT" --rdzv-conf="is_host=$is_host" \\
        --signals-to-handle=SIGINT,SIGHUP,SIGQUIT \\
        -m windlass.trainer "$WINDLASS_FOLDER/run.yaml"'

limit_near=0
is_training() {{
    awk '/"launched"/ {{on = 0}} /"(started|resumed)"/ {{on = 1}} END {{exit !on}}' "$folder/history.jsonl"
}}
near_the_limit() {{ # the ranks save; before the first step there is nothing to save
    limit_near=1
    if is_training; then scancel --signal=TERM "$job"; else scancel --signal=KILL "$job"; fi
}}
trap near_the_limit USR1 # {signal_lead(run)} s before the time limit
trap : TERM # scancel, preemption, a lost node: the ranks got it too; wait for them

while :; do
    started=$("${{here[@]}}" begin "$folder" --job="$job"{port}) || exit 1
    read -r {ATTEMPT_VARIABLE} WINDLASS_PORT <<<"$started"
    # The ranks meet on the node that runs this script: one that is up, in this stay as in the next.
    export {ATTEMPT_VARIABLE} WINDLASS_PORT WINDLASS_HEAD="$SLURMD_NODENAME"
    code=143 # the time limit is near already: nothing is started
    if [ "$limit_near" = 0 ]; then
        srun --kill-on-bad-exit=0 --wait={STRAGGLER_SECONDS} {f"--cpus-per-task={cpus} " if cpus else ""}\\
            --output="${{folder//%/%%}}/logs/launcher-%n.log" --open-mode=append \\
            "${{auto_resume[@]}}" "${{container[@]}}" bash -c "$on_every_node" "$python" &
        step=$!
        while kill -0 "$step" 2>/dev/null; do wait "$step"; done
        wait "$step"
        code=$?
    fi
    verdict=$("${{here[@]}}" end "$folder" --attempt="${ATTEMPT_VARIABLE}" --code="$code" --limit-near="$limit_near" \\
        --restarts="${{SLURM_RESTART_COUNT:-0}}" --facts="$(scontrol show job --oneliner "$job" 2>&1)")
    case "$verdict" in
    restart) ;;
    requeue)
        refusal=$(scontrol requeue "$job" 2>&1) && exit 75
        "${{here[@]}}" refused "$folder" --why="$refusal"
        exit 75
        ;;
    exit\\ *) exit "${{verdict#exit }}" ;;
    *) exit 1 ;; # it could not be written down, on a full disk say
    esac
done""".splitlines()


def _shell(variable: str) -> str:
    return f"${variable}"


def _container(asked: SlurmOptions, place: Place) -> str:
    if not asked.container:
        return "container=()"
    mounts = ",".join([f"{place.runs}:{place.runs}", *asked.container_mounts])
    words = [
        f"--container-image={asked.container}",
        f"--container-mounts={mounts}",
        f"--container-workdir={place.working_directory}",
    ]
    return f"container=({shlex.join(words)})"
