"""Render a run, or a sweep of runs, as one sbatch script. Pure: runs and paths in, text out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from windlass.runfolder import RUNS_VARIABLE
from windlass.spec import Run
from windlass.spec.slurm import SlurmOptions
from windlass.targets.launch.torchrun import ATTEMPT_VARIABLE, FAULTS_VARIABLE, FOLDER_VARIABLE, Place
from windlass.targets.protocol import LOOP_VARIABLE

HYPERPOD = "/opt/sagemaker_cluster"  # there on every node of a HyperPod Slurm cluster
MARGIN_SECONDS = 30  # beside the save itself: Slurm's clock is coarse, and ranks come to a step's end first
NEW_SUBMISSION = "SUBMISSION"  # stands for the name that every submission gets anew
STRAGGLER_SECONDS = 60  # for the other nodes to end by themselves when one has
LOOP_MINUTES = 60  # for the retry loop to decide, and for its longest back-off
CONTAINER_SECONDS = 60  # for a container to start in which windlass decides what follows


@dataclass(frozen=True)
class SlurmRequest:
    """The script as sbatch gets it, on its standard input."""

    script: str
    folders: tuple[Path, ...]  # one per run: an array has several
    indices: tuple[int, ...] | None  # of the array; None: a plain job
    host: str | None
    comment: str | None = None  # the user's own
    options: tuple[str, ...] = ()  # beside those of the script

    def command(self, submission: str) -> tuple[str, ...]:
        """The call of sbatch. The job carries its submission in its comment, so that it can be found by it."""
        comment = " ".join(filter(None, (self.comment, comment_of(submission))))
        array = (f"--array={','.join(map(str, self.indices))}",) if self.indices is not None else ()
        return ("sbatch", "--parsable", f"--comment={comment}", *array, *self.options)

    def only(self, positions: Sequence[int]) -> SlurmRequest:
        """The same for some of the array's runs."""
        if self.indices is None:
            return self
        folders, indices = self.folders, self.indices
        return replace(self, folders=tuple(folders[i] for i in positions), indices=tuple(indices[i] for i in positions))

    def __str__(self) -> str:
        where = f"ssh {self.host} " if self.host else ""
        return f"# {where}{shlex.join(self.command(NEW_SUBMISSION))} < the following\n{self.script}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": "slurm",
            "argv": list(self.command(NEW_SUBMISSION)),
            "host": self.host,
            "script": self.script,
            "folders": [str(folder) for folder in self.folders],
        }


def comment_of(submission: str) -> str:
    """What stands in the comment of a submission's job."""
    return f"windlass:{submission}"


def render(run: Run, place: Place, *, faults: str | None = None) -> SlurmRequest:
    """One run as one job."""
    folder = place.runs / run.name
    log = _literal(folder / "logs") + "/slurm-%j.out"
    script = _script(run, place, folder=quote(str(folder)), log=log, is_array=False, faults=faults)
    return SlurmRequest(script, (folder,), None, run.target.host, _own_comment(run))


def render_sweep(
    name: str, runs: Sequence[Run], indices: Sequence[int], place: Place, *, faults: str | None = None
) -> list[SlurmRequest]:
    """Runs that differ in a few keys as arrays, one for all that ask Slurm for the same. Index 3 is the run NAME-3."""
    base = place.runs / f"{name}-"
    alike: dict[tuple[str, str | None], list[int]] = {}
    for position, run in enumerate(runs):
        script = _script(
            run.model_copy(update={"name": name}),
            place,
            folder=f'{quote(str(base))}"$SLURM_ARRAY_TASK_ID"',
            log=_literal(base) + "%a/logs/slurm-%A_%a.out",
            is_array=True,
            faults=faults,
        )
        alike.setdefault((script, run.target.host), []).append(position)
    return [
        SlurmRequest(
            script,
            tuple(place.runs / f"{name}-{indices[position]}" for position in positions),
            tuple(indices[position] for position in positions),
            host,
            _own_comment(runs[positions[0]]),
        )
        for (script, host), positions in alike.items()
    ]


def _own_comment(run: Run) -> str | None:
    """The comment that a run file gives the job: an argument would replace it, so it becomes part of the argument."""
    comment = None
    for option in run.target.slurm.sbatch:
        match = re.fullmatch(r"--comment(?:=|\s+)(.*)", option)
        if match:
            try:
                comment = " ".join(shlex.split(match[1]))
            except ValueError:  # an open quote: sbatch will say so
                comment = match[1]
    return comment


def render_loop(run: Run, place: Place, arguments: Sequence[str], *, python: str) -> str:
    """The retry loop as a job of one core that begins when the run's own job has failed: until then it costs nothing.

    It decides, submits the next job with a loop of its own, and ends.
    """
    slurm, folder = run.target.slurm, place.runs / run.name
    options: list[tuple[str, str | None]] = [
        ("job-name", f"{slurm.job_name or run.name}-loop"),
        ("ntasks", "1"),
        ("cpus-per-task", "1"),
        ("mem", "1G"),
        ("time", str(LOOP_MINUTES)),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("output", f"{_literal(folder)}/logs/loop-%j.out"),
        ("chdir", str(place.working_directory)),
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={sbatch_quote(value)}" for name, value in options if value is not None),
            "#SBATCH --requeue",
            f"export {RUNS_VARIABLE}={quote(str(place.runs))} {LOOP_VARIABLE}={quote(run.name)}",
            *slurm.setup,
            f"exec {shlex.join([python, '-m', 'windlass.cli.main', *arguments, '--detach'])}\n",
        ]
    )


def signal_lead(run: Run) -> int:
    """Seconds before the time limit at which the ranks are told to save."""
    grace = run.checkpoint.grace_seconds
    return grace + min(MARGIN_SECONDS, grace) + (CONTAINER_SECONDS if run.target.slurm.container else 0)


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


def sbatch_quote(text: str) -> str:
    """A value in a #SBATCH line: sbatch reads double quotes and backslashes as a shell would, and nothing else."""
    if text and all(letter.isalnum() or letter in "-_./:,=%+@[]&|*!" for letter in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _literal(path: Path) -> str:
    """A path in a file name pattern."""
    return str(path).replace("%", "%%")


def _script(run: Run, place: Place, *, folder: str, log: str, is_array: bool, faults: str | None) -> str:
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {option}" for option in _options(run, place, log=log)]
    lines += ["", *_environment(run, place, folder=folder, faults=faults), ""]
    lines += [*run.target.slurm.setup, ""] if run.target.slurm.setup else []
    lines += _body(run, place, is_array=is_array)
    return "\n".join(lines) + "\n"


def _options(run: Run, place: Place, *, log: str) -> list[str]:
    slurm, resources = run.target.slurm, run.resources
    values: list[tuple[str, str | int | None]] = [
        ("job-name", slurm.job_name or run.name),
        ("nodes", resources.nodes),
        ("ntasks-per-node", 1),  # one torchrun per node
        ("cpus-per-task", cpus_per_task(run)),
        ("gpus-per-node", None if slurm.gres else resources.gpus_per_node or None),
        ("gres", slurm.gres),
        ("mem", slurm.memory or ("0" if slurm.exclusive else None)),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("time", time_limit(slurm.time) if slurm.time else None),
        ("constraint", slurm.constraint),
        ("signal", f"B:USR1@{signal_lead(run)}"),
        ("output", log),
        ("open-mode", "append"),
        ("chdir", str(place.working_directory)),
    ]
    lines = [f"--{name}={sbatch_quote(str(value))}" for name, value in values if value is not None]
    lines += ["--exclusive"] if slurm.exclusive else []
    lines.append("--requeue" if slurm.requeue else "--no-requeue")
    return [*lines, *slurm.sbatch]


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
    slurm = run.target.slurm
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if is_array else '"$SLURM_JOB_ID"'
    cpus = cpus_per_task(run)
    port = f" --port={run.target.port}" if run.target.port else ""
    here, at_most = '"$python" -m windlass.targets.slurm.attempt', ""
    if slurm.container:
        here = f'srun --export=ALL --nodes=1 --ntasks=1 "${{container[@]}}" {here}'
        at_most = f"timeout --kill-after=5 {CONTAINER_SECONDS - 5} "  # or the time limit ends the script with it
    return f"""\
python={quote(place.python)}
{_container(slurm, place)}
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
        --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID.${ATTEMPT_VARIABLE}" \\
        --rdzv-endpoint="$SLURM_LAUNCH_NODE_IPADDR:$WINDLASS_PORT" --rdzv-conf="is_host=$is_host" \\
        --signals-to-handle=SIGINT,SIGHUP,SIGQUIT \\
        -m windlass.trainer "$WINDLASS_FOLDER/run.yaml"'

limit_near=0
step=
happened() {{ # one of these events since the ranks were launched, and none of those after it
    awk -v on="event.:.($1)[^a-z-]" -v off="event.:.(launched${{2:+|$2}})[^a-z-]" \\
        '$0 ~ off {{yes = 0}} $0 ~ on {{yes = 1}} END {{exit !yes}}' "$folder/history.jsonl"
}}
facts() {{ scontrol show job --oneliner "$job" 2>&1; }}
near_the_limit() {{ # the ranks save; before the first step there is nothing to save
    limit_near=1
    if happened 'started|resumed'; then scancel --signal=TERM "$job"; else end_step; fi
}}
end_step() {{ if [ -n "$step" ]; then kill -TERM "$step" 2>/dev/null; fi; }} # srun kills its ranks
trap near_the_limit USR1 # {signal_lead(run)} s before the time limit
trap : TERM # scancel, preemption, a lost node: the ranks got it too; wait for them

known=$(facts)
# SLURM_RESTART_COUNT is not set before the first requeue: it may be another job's
restarts=$(grep -o ' Restarts=[0-9]*' <<<"$known" | tail -n 1)
restarts=${{restarts# Restarts=}}
restarts=${{restarts:-${{SLURM_RESTART_COUNT:-0}}}}
while :; do
    started=$("${{here[@]}}" begin "$folder" --job="$job" --facts="$known"{port}) || exit
    read -r {ATTEMPT_VARIABLE} WINDLASS_PORT <<<"$started"
    # The ranks meet on the node that runs this script: one that is up, in this stay as in the next.
    export {ATTEMPT_VARIABLE} WINDLASS_PORT WINDLASS_HEAD="$SLURMD_NODENAME"
    code=143 # the time limit is near already: nothing is started
    if [ "$limit_near" = 0 ]; then
        srun --export=ALL --kill-on-bad-exit=0 --wait={STRAGGLER_SECONDS} {f"--cpus-per-task={cpus} " if cpus else ""}\\
            --output="${{folder//%/%%}}/logs/launcher-%n.log" --open-mode=append \\
            "${{auto_resume[@]}}" "${{container[@]}}" bash -c "$on_every_node" "$python" &
        step=$!
        if [ "$limit_near" = 1 ]; then end_step; fi # since a moment ago
        while kill -0 "$step" 2>/dev/null; do wait "$step"; done
        wait "$step"
        code=$?
        step=
    fi
    verdict=$({at_most}"${{here[@]}}" end "$folder" --attempt="${ATTEMPT_VARIABLE}" --code="$code" \\
        --limit-near="$limit_near" --restarts="$restarts" --facts="$(facts)")
    if [ -z "$verdict" ]; then # nobody decided: the container did not start, or was killed
        if happened finished; then
            verdict="exit 0"
        elif happened stop-requested stop-refused; then
            verdict="exit 75"
        elif [ "$limit_near" = 1 ] || happened preempted; then
            verdict={"requeue" if slurm.requeue else '"exit 75"'}
        fi
    fi
    case "$verdict" in
    restart) ;;
    requeue)
        refusal=$(scontrol requeue "$job" 2>&1) && exit 75
        "${{here[@]}}" refused "$folder" --why="$refusal"
        exit 75
        ;;
    exit\\ *) exit "${{verdict#exit }}" ;;
    *) exit 1 ;;
    esac
done""".splitlines()


def _container(slurm: SlurmOptions, place: Place) -> str:
    if not slurm.container:
        return "container=()"
    mounts = ",".join([f"{place.runs}:{place.runs}", *slurm.container_mounts])
    words = [
        f"--container-image={slurm.container}",
        f"--container-mounts={mounts}",
        f"--container-workdir={place.working_directory}",
    ]
    return f"container=({shlex.join(words)})"
