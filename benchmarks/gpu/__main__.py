"""Measure contestants at points, each in a process of its own, and print one table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.contestants import CONTESTANTS, DEFAULT_CONTESTANTS
from benchmarks.gpu.machine import describe, gpu_state
from benchmarks.gpu.points import DEFAULT_POINTS, POINTS
from benchmarks.gpu.rows import Row, failed, last_line
from benchmarks.gpu.table import CONVENTIONS, table

ROOT = Path(__file__).resolve().parents[2]
WARMUP = 3


def main() -> int:
    options = parse_arguments()
    begin = time.monotonic()
    before = gpu_state()
    rows: list[Row] = []
    for point in options.points:
        for contestant in options.contestants:
            left = options.time_limit - (time.monotonic() - begin)
            if left < options.least_time:
                row = failed(contestant, point, f"not started: {options.time_limit:.0f} s are nearly over")
            else:
                row = measure(contestant, point, options, limit=min(left, options.contestant_limit))
            rows.append(row)
            outcome = row.error or f"{row.tokens_per_s:,.0f} tokens/s, {row.peak_gib:.1f} GiB"
            print(f"{time.monotonic() - begin:5.0f} s  {point} {contestant}: {outcome}", file=sys.stderr, flush=True)
            if options.out:
                write_results(options.out, rows, before)
    print(table(rows))
    print(f"\n{CONVENTIONS}")
    versions = {name: version for row in rows for name, version in row.versions.items()}
    print(f"\n{describe(before)}; {', '.join(f'{name} {version}' for name, version in versions.items())}")
    return 1 if any(row.error for row in rows) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--points", type=names_of(POINTS), default=DEFAULT_POINTS, help=f"of {', '.join(POINTS)}")
    parser.add_argument(
        "--contestants", type=names_of(CONTESTANTS), default=DEFAULT_CONTESTANTS, help=f"of {', '.join(CONTESTANTS)}"
    )
    parser.add_argument("--steps", type=int, default=15, help=f"{WARMUP} of them are not timed")
    parser.add_argument("--wheels", type=Path, default=Path("bench-wheels/site"), help="folder of unpacked wheels")
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON, after every row")
    parser.add_argument("--logs", type=Path, help="keep what each contestant said in this folder")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="section.key=value for windlass")
    parser.add_argument("--time-limit", type=float, default=520.0, help="seconds; what has not begun by then is a row")
    parser.add_argument("--contestant-limit", type=float, default=180.0, help="seconds of one contestant")
    parser.add_argument("--least-time", type=float, default=25.0, help="seconds that must be left to start one more")
    options = parser.parse_args()
    if options.steps <= WARMUP:
        parser.error(f"--steps must be above {WARMUP}")
    return options


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name for name in text.split(",") if name)
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'} is not one of {', '.join(known)}")
        return names

    return parse


def measure(contestant: str, point: str, options: argparse.Namespace, *, limit: float) -> Row:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="windlass-bench-gpu-") as folder:
        row = run_contestant(contestant, point, options, folder=folder, limit=limit)
    return replace(row, notes={"wall_s": round(time.monotonic() - begin, 1), "gpu_after": gpu_state()})


def run_contestant(contestant: str, point: str, options: argparse.Namespace, *, folder: str, limit: float) -> Row:
    """The contestant's own row; or one that says how its process ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.contestant", contestant, point, f"--folder={folder}"]
    command += [f"--steps={options.steps}", f"--warmup={WARMUP}", *(f"--set={one}" for one in options.overrides)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(contestant, options.wheels),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complained = process.communicate(timeout=limit)
        row = read_row(said) or failed(
            contestant, point, f"exit code {process.returncode}: {last_line(complained or said)}"
        )
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: the trainer it started goes with it
        said, complained = process.communicate()
        row = failed(contestant, point, f"stopped after {limit:.0f} s: {last_line(complained)}")
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
        (options.logs / f"{point}.{contestant}.log").write_text(complained + said)
    return row


def read_row(said: str) -> Row | None:
    for line in reversed(said.splitlines()):
        if line.startswith('{"contestant"'):
            return Row(**json.loads(line))
    return None


def environment(contestant: str, wheels: Path) -> dict[str, str]:
    """A world of one rank, the unpacked wheels, and a compile cache that contestants share."""
    # What an installed nvidia-cutlass-dsl adds to the path by a .pth file, which an unpacked one cannot.
    folders = [ROOT, wheels.resolve(), wheels.resolve() / "nvidia_cutlass_dsl" / "dsl_packages"]
    path = os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH", "")]))
    cache = Path(tempfile.gettempdir()) / "windlass-bench-gpu" / "inductor"
    ours = {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache)),
        "HF_HUB_OFFLINE": "1",
    }
    if contestant.startswith("torchtitan"):
        ours["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as its run_train.sh does
    return os.environ | ours


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_results(path: Path, rows: Sequence[Row], before: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"gpu": before, "rows": [row.as_dict() for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
