"""The run folder: the same layout on every target, and the append-only records in it.

runs/<name>/run.yaml                    the resolved run
            metrics.jsonl               one object per step (docs/metrics.md)
            history.jsonl               attempts, exits, decisions
            events.jsonl                what the target reported while the job ran
            checkpoints/step-00000100/  with manifest.json once complete
            logs/rank-0003.log          what a rank said; rank-0003.error.json if it failed
            evaluations.jsonl           results of `windlass eval`
            export/                     Hugging Face folder
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.common.files import (
    append_json_line,
    parse_record,
    read_json_lines,
    real,
    whole,
    write_atomically,
)
from windlass.errors import UserError

if TYPE_CHECKING:  # what reads a run file is imported when one is read: the shell completes names of runs without it
    from windlass.spec import Run
    from windlass.spec.compatibility import Changes

RUNS_VARIABLE = "WINDLASS_RUNS"
SAVED = ("checkpoint", "resumed")  # events that say that there is, or was, a checkpoint
MOST_BYTES = 1024 * 1024  # of a line that is looked at
TARGET_KIND = re.compile(rb"^target:\n(?:  .*\n)*?  kind: ([a-z]+)$", re.MULTILINE)


def runs_root() -> Path:
    """Where run folders live: $WINDLASS_RUNS, else `runs` below the working directory."""
    return Path(os.environ.get(RUNS_VARIABLE) or "runs")


def _where_it_is(name: str) -> str | None:
    """How to reach a run that was started in a folder above this one."""
    roots = [folder / "runs" for folder in Path.cwd().parents]
    root = next((root for root in roots if (root / name / "run.yaml").is_file()), None)
    return f"cd {root.parent}    or export {RUNS_VARIABLE}={root}: the run is there" if root else None


@dataclass(frozen=True)
class _Inside:
    """A file or folder of every run folder, by its name there."""

    file: str

    def __get__(self, folder: RunFolder, _owner: type[RunFolder]) -> Path:
        return folder.path / self.file


@dataclass(frozen=True)
class RunFolder:
    path: Path

    run_file = _Inside("run.yaml")
    metrics = _Inside("metrics.jsonl")
    history = _Inside("history.jsonl")
    events = _Inside("events.jsonl")
    evaluations = _Inside("evaluations.jsonl")
    checkpoints = _Inside("checkpoints")
    logs = _Inside("logs")
    export = _Inside("export")

    @classmethod
    def of(cls, run: Run) -> RunFolder:
        return cls(runs_root() / run.name)

    @classmethod
    def find(cls, name: str) -> RunFolder:
        """The folder of an existing run, by its name or its path."""
        for path in (runs_root() / name, Path(name)):
            if (path / "run.yaml").is_file():
                return cls(path)
        known = sorted(p.parent.name for p in runs_root().glob("*/run.yaml"))
        raise UserError(
            f"there is no run {name!r} under {runs_root()}/",
            evidence=f"runs there: {', '.join(known)}" if known else f"no runs in {runs_root().absolute()}",
            fix=_where_it_is(name) or "windlass ls",
            error_code="no-such-run",
        )

    @property
    def name(self) -> str:
        return self.path.name

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:04d}.log"

    def rank_error(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:04d}.error.json"

    def create(self, run: Run) -> None:
        """Make the folder of a run, or give an existing one its new settings; what changed is in the history."""
        from windlass.spec import dump_run
        from windlass.spec.compatibility import differences, steering

        self.logs.mkdir(parents=True, exist_ok=True)
        changed: Changes = {}
        if self.run_file.is_file():
            with contextlib.suppress(UserError):  # of another version, or damaged: there is nothing to compare with
                before = self.load_run()
                if differences(before, run):  # possible only while nothing is saved: those steps belong to another run
                    self._set_aside_metrics()
                changed = differences(before, run) | steering(before, run)
        write_atomically(self.run_file, dump_run(run, written_from=Path.cwd()))
        if changed:
            self.record("settings-changed", changes={key: list(values) for key, values in changed.items()})

    def _set_aside_metrics(self) -> None:
        number = 1
        while (aside := self.path / f"metrics.old-{number}.jsonl").exists():
            number += 1
        if self.metrics.exists():
            self.metrics.rename(aside)

    def load_run(self) -> Run:
        from windlass.spec import load_run

        return load_run(self.run_file, saved=True)

    def target_kind(self) -> str:
        """Where the run goes. Of a run file that windlass wrote without reading all of it: `ls` asks thousands."""
        text = self.run_file.read_bytes()
        match = TARGET_KIND.search(text)
        if match and b"\nmodel:\n" in text and b"\ndata:\n" in text:
            return match[1].decode()
        return str(self.load_run().target.kind)

    def began(self) -> float | None:
        """When something was first recorded of this run."""
        try:
            with self.history.open("rb") as file:
                record = parse_record(file.readline(MOST_BYTES))
        except OSError:
            return None
        return real(record.get("time")) if record else None

    def errors(self, attempt: int | None = None) -> list[dict[str, Any]]:
        """The error files that ranks wrote, in one attempt or at all, the first one first."""
        errors = []
        for path in self.logs.glob("rank-*.error.json"):
            try:
                error = parse_record(path.read_bytes())
            except OSError:
                continue
            if error is not None and attempt in (None, error.get("attempt")):  # one torn by a kill says nothing
                errors.append(error)
        return sorted(errors, key=lambda error: real(error.get("time")) or 0.0)

    def has_checkpoints(self) -> bool:
        """Whether this run has ever saved anything: what is here now, or was published in any tier."""
        published = any(self.checkpoints.glob("step-*/manifest.json"))
        return published or any(record.get("event") in SAVED for record in read_json_lines(self.history))

    def record(self, event: str, **facts: Any) -> None:
        """Append one line to history.jsonl."""
        append_json_line(self.history, {"time": round(time.time(), 3), "event": event, **facts})


def steps_of(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """The metrics of each training step; where a step was repeated after a restart, the last one counts."""
    records = (record for record in read_json_lines(folder.metrics) if record.get("kind") == "step")
    return {step: record for record in records if (step := whole(record.get("step"))) is not None}
