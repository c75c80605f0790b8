"""Slurm's records of a job, from the JSON, the parseable text or the tables of sacct and scontrol."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.diagnose import reading as read

MOST_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class SlurmRecord:
    """A job or a step of it, as accounting or the controller has it."""

    name: str  # 123, 123.batch, 123.0
    state: str
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    comment: str = ""
    source: str = "sacct"
    time: str = ""  # when it ended, or was submitted
    used: float = 0.0  # MiB of memory, at most
    requested: float = 0.0  # MiB of memory
    resources: str = ""  # cpu=8,mem=64G,gres/gpu=8

    def __str__(self) -> str:
        code = f" exit code {self.exit_code}" if self.exit_code else ""
        signal = f" signal {self.signal}" if self.signal else ""
        return f"{self.name} {self.state} {self.reason}{code}{signal} {self.comment}".strip()


def slurm_records(value: Any) -> Iterator[SlurmRecord]:
    facts = read.mapping(value)
    for source in ("scontrol", "sacct"):
        part = facts.get(source)
        if isinstance(part, str):
            yield from _slurm_text(read.clean(part[:MOST_CHARACTERS]), source)
            continue
        jobs = read.at(part, "jobs") if isinstance(read.at(part, "jobs"), list) else part
        for job in read.objects(jobs):
            yield from _slurm_record(job, source)
            for step in read.objects(job.get("steps")):
                yield from _slurm_record(step, source)


def _slurm_record(value: Mapping[str, Any], source: str) -> Iterator[SlurmRecord]:
    fields = {str(key).lower().replace("_", ""): part for key, part in value.items()}
    state, reason = fields.get("jobstate", fields.get("state")), fields.get("statereason", fields.get("reason"))
    if isinstance(state, Mapping):  # sacct --json
        reason = reason or state.get("reason")
        state = state.get("current")
    words = " ".join(map(read.text, state)) if isinstance(state, list) else read.text(state)
    code, signal = _exit_code(fields.get("exitcode"))
    derived, _ = _exit_code(fields.get("derivedexitcode"))
    step = read.mapping(fields.get("step"))
    name = read.text(step.get("id") or fields.get("jobid") or fields.get("name"))
    comment = " ".join(
        read.text(fields.get(key)) for key in ("comment", "admincomment", "systemcomment", "statedescription")
    )
    killer = read.text(read.at(fields.get("killrequestuser"), "name") or fields.get("killrequestuser"))
    if words:
        words += f" by {killer}" if killer and killer != "0" and "CANCEL" in words and " by " not in words else ""
        times = (read.text(fields.get(key)) for key in ("end", "endtime", "start", "submit"))
        when = next((time for time in times if time[:1].isdigit()), "")
        code = code if code else derived or code
        tres = read.text(fields.get("tres") or fields.get("reqtres") or fields.get("alloctres"))
        memory = (_mebibytes(fields.get("maxrss")), _mebibytes(fields.get("reqmem")))
        yield SlurmRecord(name, words, read.text(reason), code, signal, comment.strip(), source, when, *memory, tres)


def _mebibytes(value: Any) -> float:
    """An amount as sacct prints it: 302412K, 100M, 4Gn."""
    match = re.fullmatch(r"([\d.]{1,15})([KMGT]?)[nc]?", read.text(value))
    scale = {"": 2.0**-20, "K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20}
    return float(match[1]) * scale[match[2]] if match and match[1].count(".") < 2 and match[1] != "." else 0.0


def last_job(recorded: Iterator[SlurmRecord]) -> tuple[SlurmRecord, ...]:
    """The records of one job: the controller's, or the one that ended last; an earlier one is another attempt."""

    records = list(recorded)

    def number(record: SlurmRecord) -> str:
        return record.name.split(".")[0]

    by_controller = [record for record in records if record.source == "scontrol" and record.name]
    jobs = by_controller or [record for record in records if "." not in record.name]
    if not jobs:
        return tuple(records)
    last = number(max(jobs, key=lambda record: record.time)) if all(job.time for job in jobs) else number(jobs[-1])
    own = [record for record in records if number(record) == last or not record.name]
    whole = [record for record in own if "." not in record.name and record.source == "sacct"]
    # a requeued job has a row for every stay on the nodes
    old = whole[:-1] if not by_controller or not all("PENDING" in record.state for record in whole) else whole
    return tuple(record for record in own if record not in old)


def _exit_code(value: Any) -> tuple[int | None, int | None]:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(-?\d{1,9})(?::(\d{1,4}))?\s*", value)
        return (int(match[1]), int(match[2] or 0) or None) if match else (None, None)
    if isinstance(value, Mapping):
        signal = read.at(value, "signal", "id") or value.get("signal")
        return read.number(value.get("return_code", value.get("number"))), read.number(signal)
    return read.number(value), None


def _slurm_text(text: str, source: str) -> Iterator[SlurmRecord]:
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and "|" in lines[0]:  # sacct --parsable2, with its header
        header = [name.strip() for name in lines[0].split("|")]
        for line in lines[1:]:
            yield from _slurm_record(dict(zip(header, line.split("|"), strict=False)), source)
        return
    blocks = re.split(r"(?=\bJobId=)", text)
    for block in blocks:
        fields = dict(re.findall(r"(?<!\S)([A-Za-z:_/]+)=(\S*)", block))
        if "JobState" in fields:
            yield from _slurm_record({**fields, "name": fields.get("JobId", "")}, source)
    if "JobState=" not in text and lines and "State" in lines[0]:  # sacct's table of fixed columns
        rule = next((line for line in lines if set(line.strip()) <= {"-", " "}), "")
        spans = [match.span() for match in re.finditer(r"-+", rule)]
        header = [lines[0][begin:end].strip() for begin, end in spans]
        for line in lines[1:]:
            if line is not rule:
                row = {name: line[begin:end].strip() for name, (begin, end) in zip(header, spans, strict=True)}
                yield from _slurm_record(row, source)
