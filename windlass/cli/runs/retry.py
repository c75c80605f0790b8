"""The loop around a run: what ends it or keeps it from beginning is diagnosed, decided, recorded, and acted upon.

A decision is recorded before it is acted upon, and everything else is read back from the history: the command may be
killed anywhere, and the same command goes on from the last decision without taking it again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.api.preparation import Prepared, is_under_way
from windlass.cli.runs.follow import describe_event
from windlass.common.files import read_json_lines, real
from windlass.diagnose import Facts, Verdict, diagnose
from windlass.diagnose.bundle import facts_of_run
from windlass.diagnose.classes import CLASSES
from windlass.diagnose.decision import SURE, Decision, Policy, decide, excluded, last_mark, verdict_of
from windlass.diagnose.remedies import edited, may_edit, remedy_for
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder
from windlass.spec import Run, load_run
from windlass.targets import target
from windlass.targets.launch.ending import unrecorded_end
from windlass.targets.protocol import CanWithdraw, JobRef, JobStatus, KeepsLoop, KnowsFacts, Target

LOOK_SECONDS = 5.0  # between two looks at a job that waits; a decision needs two that agree
BACKOFF_SECONDS, LARGEST_BACKOFF = 5.0, 300.0
# What keeps a job from beginning; other verdicts on a job that waits are about an attempt that has ended.
BEFORE_IT_BEGINS = frozenset(
    (
        "admission_denied", "cloud_capacity", "config_missing", "container_start", "cpu_memory_request",
        "efa_unavailable", "gpu_plugin_missing", "gpu_unavailable", "image_auth", "image_missing", "image_platform",
        "image_rate_limit", "ip_exhausted", "job_held", "mount_failed", "node_affinity", "pod_limit", "queue_never",
        "queue_wait", "quota", "taint", "volume_unbound",
    )
)  # fmt: skip


def policy_of(run: Run, patience: float) -> Policy:
    """What may be tried with new jobs. On this machine a new start meets the same machine: only edits help."""
    kind = run.target.kind
    return Policy(
        restarts=0 if kind == "local" else run.target.max_restarts,
        backoff_seconds=BACKOFF_SECONDS,
        largest_backoff=LARGEST_BACKOFF,
        patience=patience,
        after_limits=kind != "kubernetes",  # where only the run's own deadline is one
        record="retry",
    )


def overrides_of_decisions(run_file: str, changes: Sequence[str]) -> list[str]:
    """The edits that earlier decisions made to this run, as overrides.

    An edit holds while the run file says what it said when the edit was decided: somebody's own change goes before it.
    """
    requested = load_run(run_file, changes)
    history = _history(RunFolder.of(requested))
    values = requested.model_dump(mode="json")
    edits: dict[str, Any] = {}
    for record in history:
        edit = record.get("edit") if record.get("event") == "retry" else None
        for key, pair in edit.items() if isinstance(edit, dict) and may_edit(edit) else ():
            current = edits.get(key, edited(values, {key: 0})[key][0])
            if isinstance(pair, list) and len(pair) == 2 and current == pair[0]:
                edits[key] = pair[1]
    nodes = excluded(history)
    if nodes and requested.target.kind == "kubernetes":
        edits["target.kubernetes.exclude_nodes"] = [*requested.target.kubernetes.exclude_nodes, *nodes]
    if nodes and requested.target.kind == "slurm":
        edits["target.slurm.sbatch"] = [*requested.target.slurm.sbatch, f"--exclude={','.join(nodes)}"]
    return [f"{key}={json.dumps(value)}" for key, value in edits.items()]


def carry_out_pending(run_file: str, changes: Sequence[str]) -> None:
    """Take back a job that a decision was about to replace when the command was killed."""
    requested = load_run(run_file, changes)
    folder = RunFolder.of(requested)
    if not folder.run_file.is_file() or not is_pending(_history(folder)):
        return
    before = folder.load_run()
    where, job = target(before.target), JobRef(before.target.kind, folder.name, folder)
    if not has_loop(where, job) and is_under_way(where.status(job)):
        withdraw(where, job)


def has_loop(where: Target[Any], job: JobRef) -> bool:
    """Whether a loop that goes on without a client decides for the run: then nobody else does."""
    return isinstance(where, KeepsLoop) and where.has_loop(job)


def is_pending(history: Sequence[Mapping[str, Any]]) -> bool:
    return last_mark(history) == "retry"


def withdraw(where: Target[Any], job: JobRef) -> None:
    """Take a job back, to submit it anew: nothing of it trains, so there is nothing to save."""
    if isinstance(where, CanWithdraw):
        where.withdraw(job)
    else:
        where.stop(job, save_first=False)


@dataclass
class Decider:
    """Decides for one job: while it waits, and when it has failed."""

    prepared: Prepared
    requested: Mapping[str, Any]  # the run file's values, with overrides and earlier edits
    job: JobRef
    policy: Policy
    report: Callable[[str, dict[str, Any]], None]
    record: Callable[..., None]  # writes down what was decided, before it is acted upon
    decision: Decision | None = None  # what was decided while the job waited
    _looked: float = field(default_factory=time.monotonic)
    _last: str | None = None  # the class at the last look
    _recorded: str | None = None  # the class that the history names already

    def is_held(self, status: JobStatus) -> bool:
        """Whether a job that waits is to be taken back: it will not begin as it is."""
        now = time.monotonic()
        if self.job.target == "local" or status.state != "waiting" or now < self._looked + LOOK_SECONDS:
            return False
        self._looked = now
        with contextlib.suppress(UserError):  # a Slurm that does not answer now
            if has_loop(self.prepared.target, self.job):  # left there since this command began
                return False
        facts = Facts.read(self._facts(status))
        verdict = diagnose(facts)
        agrees, self._last = verdict.name == self._last, verdict.name
        if not agrees or verdict.name not in BEFORE_IT_BEGINS:
            return False
        decision = self._decide(verdict, facts, waited=self._waited())
        if decision.action != "wait":
            self.decision = decision
            return True
        if self._recorded != decision.name:
            self._recorded = decision.name
            fix = CLASSES[decision.name].fix
            self.record("waits", **{"class": decision.name}, why=decision.reason, fix=fix)
        return False

    def after(self, status: JobStatus) -> Decision | None:
        """What follows the end of a job; None where there is nothing to decide."""
        if self.decision is not None or status.state != "failed":
            return self.decision
        facts = Facts.read(self._facts(status))
        return self._decide(self._verdict(facts), facts)

    def _decide(self, verdict: Verdict, facts: Facts, *, waited: float | None = None) -> Decision:
        remedy = remedy_for(verdict, self.prepared.run, facts) if verdict.confidence >= SURE else None
        return decide(verdict, _history(self.job.folder), self.policy, remedy=remedy, waited=waited)

    def _verdict(self, facts: Facts) -> Verdict:
        """The diagnosis; but a rank's own word that the program is at fault goes before it."""
        diagnosed = diagnose(facts)
        history = _history(self.job.folder)
        launched = max((at for at, record in enumerate(history) if record.get("event") == "launched"), default=0)
        given_up = [record for record in history[launched:] if record.get("event") == "gave-up"]
        name = str(given_up[-1].get("class")) if given_up else ""
        if name not in CLASSES or name == "unknown" or name == diagnosed.name:
            return diagnosed
        if CLASSES[name].kind == "user" or diagnosed.confidence < SURE:
            return verdict_of(name, str(given_up[-1].get("why")))
        return diagnosed

    def _waited(self) -> float:
        marks = ("submitted", "launched", "restart")
        times = [real(record.get("time")) for record in _history(self.job.folder) if record.get("event") in marks]
        return time.time() - (times[-1] or 0.0) if times else 0.0

    def _facts(self, status: JobStatus) -> dict[str, Any]:
        """What the run folder holds and the cluster says now."""
        folder, target = self.job.folder, self.prepared.target
        facts = facts_of_run(folder, unrecorded_end(folder, status))
        live: dict[str, Any] = {}
        with contextlib.suppress(UserError):  # a cluster that does not answer now; the run folder speaks for itself
            live = target.collect(self.job) if isinstance(target, KnowsFacts) else {}
        events = [*facts.pop("events", []), *live.pop("events", [])]
        return {**facts, **{key: value for key, value in live.items() if value}, "events": events}

    def carry_out(self, decision: Decision) -> None:
        """Write down and say what was decided, and make way for the next job."""
        facts = decision.as_record()
        if decision.edit:
            facts["edit"] = edited(self.requested, decision.edit)
        self.record("retry", **facts)
        record = {"kind": "event", "event": "retry", **facts}
        self.report(describe_event(record) or "", record)
        if self.decision is not None:  # it waits
            withdraw(self.prepared.target, self.job)
        time.sleep(wait_before(_history(self.job.folder)))

    def give_up(self, decision: Decision) -> JobStatus:
        """End a job that will not begin."""
        self.record("gave-up", **decision.as_record())
        withdraw(self.prepared.target, self.job)
        self.record("exit", state="failed", code=int(ExitCode.FAILED), reason=decision.reason)
        return JobStatus("failed", reason=decision.reason, exit_code=int(ExitCode.FAILED))


def wait_before(history: Sequence[Mapping[str, Any]]) -> float:
    """Seconds until the last decision may be acted upon: its back-off, less what has gone by since."""
    last: Mapping[str, Any] = next((record for record in reversed(history) if record.get("event") == "retry"), {})
    until = (real(last.get("time")) or 0.0) + (real(last.get("backoff")) or 0.0)
    return max(0.0, until - time.time())


def _history(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_json_lines(folder.history))
