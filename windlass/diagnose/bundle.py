"""Bundles: facts as one tar file, a folder, a JSON file or a log, and the facts that a run folder holds."""

from __future__ import annotations

import io
import json
import pickle
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from windlass.common.files import parse_record, real, whole, words
from windlass.common.files import read_json_lines as records_of
from windlass.diagnose.reading import clean, moment
from windlass.diagnose.secrets import without_secrets
from windlass.errors import UserError
from windlass.runfolder import RunFolder

FACTS_FILE = "facts.json"
PARTS = ("target", "job", "pods", "events", "nodes", "workload")
PART_OF_KIND = {"Pod": "pods", "Event": "events", "Node": "nodes", "Workload": "workload"}  # any other is the job
SLURM_PARTS = ("sacct", "scontrol")
LOG_ENDINGS = (".log", ".out", ".err", ".txt")
RECORDED = ("process_group", "collective_seq_id", "profiling_name", "input_sizes", "state", "is_p2p")
MOST_ENTRIES = 50  # of a rank's flight recorder: the last ones
MOST_BYTES = 64 * 1024 * 1024  # of a file that is read
MOST_LOG_BYTES = 2 * 1024 * 1024  # of a rank's log: its end


def read_bundle(path: Path) -> dict[str, Any]:
    """The facts of a tar file, a folder, a JSON file or a log."""
    if path.is_dir():
        if (path / "run.yaml").is_file():
            return facts_of_run(RunFolder(path))
        files = ((str(file.relative_to(path)), _head(file)) for file in sorted(path.rglob("*")) if file.is_file())
        return _assembled(files, str(path))
    if path.is_file() and tarfile.is_tarfile(path):  # a pipe cannot be rewound
        return _assembled(_members(path), str(path))
    content = _head(path)
    if path.suffix in LOG_ENDINGS and not content.lstrip().startswith(b"{"):
        return {"logs": {path.stem: content.decode("utf-8", "replace")}}
    return _json_object(content, str(path))


def save_bundle(facts: Mapping[str, Any], path: Path) -> None:
    """Write the facts, without secrets, as a tar file that can be read by people too."""
    cleaned = without_secrets(dict(facts))
    logs = cleaned.pop("logs", {})
    contents = {FACTS_FILE: json.dumps(cleaned, indent=1, default=str)}
    contents |= {
        f"logs/{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.log": text
        for name, text in logs.items()
        if isinstance(text, str)
    }
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as archive:
        for name, text in contents.items():
            data = clean(text).encode()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o600
            archive.addfile(member, io.BytesIO(data))


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    yield member.name, file.read(MOST_BYTES)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{path} is no whole bundle", evidence=str(error)) from None


def _assembled(files: Iterator[tuple[str, bytes]], whence: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    logs: dict[str, str] = {}
    for name, content in files:
        file = name.rsplit("/", 1)[-1]
        stem, dot, ending = file.rpartition(".")
        if file == FACTS_FILE:
            facts |= _json_object(content, f"{whence}: {name}")
        elif stem in SLURM_PARTS:
            text = content.decode("utf-8", "replace")
            facts.setdefault("slurm", {})[stem] = _json_value(text) if ending == "json" else text
        elif stem in PARTS and ending == "json":
            facts[stem] = _json_value(content.decode("utf-8", "replace"))
        elif f"{dot}{ending}" in LOG_ENDINGS:
            logs[stem] = content.decode("utf-8", "replace")
    known = facts.get("logs")
    facts["logs"] = {**(known if isinstance(known, dict) else {}), **logs}
    if not logs and len(facts) == 1:
        raise UserError(
            f"{whence} holds no facts",
            fix=f"a bundle has {FACTS_FILE}, or pods.json, events.json, logs/*.log; see docs/why.md",
        )
    return facts


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read", evidence=error.strerror) from None


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_object(content: bytes, whence: str) -> dict[str, Any]:
    value = _json_value(content.decode("utf-8", "replace"))
    if not isinstance(value, dict):
        raise UserError(
            f"{whence} holds no facts", evidence="a JSON object is expected", fix="docs/facts.schema.json describes it"
        )
    inner = value.get("facts")  # a case of the corpus of tests
    if isinstance(inner, dict) and "expect" in value:
        return inner
    return _by_kind(value) if isinstance(value.get("kind"), str) else value


def _by_kind(value: dict[str, Any]) -> dict[str, Any]:
    """What `kubectl get … -o json` prints, one object or a list of them, as facts."""
    items = value.get("items")
    facts: dict[str, Any] = {}
    for item in items if isinstance(items, list) else [value]:
        kind = item.get("kind") if isinstance(item, dict) else None
        facts.setdefault(PART_OF_KIND.get(str(kind), "job"), []).append(item)
    return facts


# A run folder.


def facts_of_run(folder: RunFolder, end: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a run folder holds: history, the ranks' logs and error files, launchers' logs, archived events.

    `end`: that of the run, where its history does not have it.
    """
    history = [*records_of(folder.history), *([dict(end)] if end else [])]
    launches = [record for record in history if record.get("event") == "launched"]
    began = real(launches[-1].get("time")) if len(launches) > 1 else None
    attempt = whole(launches[-1].get("attempt")) if launches else None
    logs: dict[str, str] = {}
    for path in sorted(folder.logs.glob("*")):
        if path.suffix in (".log", ".out") and path.is_file() and not path.is_symlink():
            rank = re.fullmatch(r"rank-0*(\d+)\.log", path.name)
            logs[f"rank{rank[1]}" if rank else path.stem] = _since(_tail(path), began, attempt)
    for error in folder.errors(attempt or 0):
        name, traceback = f"rank{error.get('rank')}", words(error.get("traceback")) or ""
        last = traceback.strip().rpartition("\n")[2]
        if last and last not in logs.get(name, ""):
            head = f"{_stamp(real(error.get('time')))}ERROR rank failed on {error.get('host')}"
            logs[name] = f"{logs.get(name, '')}\n{head}\n{traceback}"
    is_over = any(record.get("event") == "exit" for record in _since_launch(history))
    if not is_over and (slow := _slow_ranks(folder)):
        logs["ranks"] = slow
    facts: dict[str, Any] = {"target": _kind(folder), "logs": logs, "events": list(records_of(folder.events))}
    if recorders := dict(_flight_recorders(folder)):
        facts["flight_recorders"] = recorders
    conditions = [condition for record in _since_launch(history) if (condition := _condition(record))]
    if conditions:
        facts["job"] = {"metadata": {"name": folder.name}, "status": {"conditions": conditions}}
    return facts


def _slow_ranks(folder: RunFolder) -> str:
    """What the run's newest comparison of its ranks says, a line for each that takes half as long again as others."""
    compared = [line for line in _tail(folder.metrics).splitlines() if line.startswith('{"kind":"ranks"')]
    record = (parse_record(compared[-1]) if compared else None) or {}
    rows = record.get("ranks")
    lines = []
    for row in rows if isinstance(rows, list) else ():
        behind_s, step_s = (real(row.get(key)) or 0.0 for key in ("behind_s", "step_s"))
        if 0.0 < step_s <= 3 * behind_s:
            where = f"slow rank {row.get('rank')} on {row.get('host')}"
            lines.append(f"{where}: {behind_s:.3g} s behind the others in steps of {step_s:.3g} s")
    return "\n".join(f"{_stamp(real(record.get('time')))}{line}" for line in lines)


class _PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, texts and numbers, which torch's dumps consist of; a pickle of anything else fails."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def _flight_recorders(folder: RunFolder) -> Iterator[tuple[str, dict[str, Any]]]:
    """What torch's flight recorder dumped when a collective timed out, the last collectives of every rank."""
    for path in sorted(folder.logs.glob("nccl-trace-rank-*")):
        rank = re.search(r"(\d+)$", path.name)
        try:
            dump = _PlainUnpickler(io.BytesIO(_head(path))).load() if rank else None
            entries = [{key: entry.get(key) for key in RECORDED} for entry in dump["entries"]] if dump else []
        except Exception:  # cut off, or of another program
            continue
        if rank:
            yield f"rank{rank[1]}", {"entries": entries[-MOST_ENTRIES:]}


def _since_launch(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    at = max((index for index, record in enumerate(history) if record.get("event") == "launched"), default=0)
    return history[at:]


def _condition(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """A record of the history as a condition of the job."""
    when = _stamp(real(record.get("time"))).strip()
    state = record.get("state")
    named: tuple[str, str] | None = None
    match record.get("event"):
        case "exit":
            named = {
                "finished": ("Complete", ""),
                "failed": ("Failed", ""),
                "stopped": ("Stopped", "Stopped"),
                "preempted": ("Preempted", "Preempted"),
            }.get(str(state))
        case "rank-died" if record.get("oom"):
            named = ("RankDied", "OOMKilled")
        case "node-lost":
            named = ("NodeLost", "NodeLost")
        case "stop-requested":
            named = ("Stopped", "Stopped")
    if named is None:
        return None
    message = words(record.get("reason")) or words(record.get("oom")) or words(record.get("why")) or ""
    return {"type": named[0], "status": "True", "reason": named[1], "message": message, "lastTransitionTime": when}


def _since(text: str, began: float | None, attempt: int | None) -> str:
    """A log with a line where the last attempt begins."""
    if began is None:
        return text
    lines = text.splitlines()
    for index, line in enumerate(lines):
        when = moment(line.lstrip("["))
        if when is not None and when >= began - 1.0:
            return "\n".join([*lines[:index], f"restarting: attempt {attempt}", *lines[index:]])
    return "\n".join([*lines, f"restarting: attempt {attempt}"])


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MOST_LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _kind(folder: RunFolder) -> str:
    try:
        return folder.target_kind()
    except Exception:  # a run file of another version; the facts do not depend on it
        return ""


def _stamp(when: float | None) -> str:
    from windlass.diagnose.timeline import clock_text

    text = clock_text(when)
    return f"{text} " if text else ""
