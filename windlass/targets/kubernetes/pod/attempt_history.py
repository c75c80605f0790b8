"""What node 0 writes down of the attempts of a run, and what it concludes from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.common.files import read_json_lines
from windlass.errors import ExitCode
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.spec.compatibility import must_match
from windlass.targets.kubernetes.pod.verdict import Again, NodeEnd, deaths_of, verdict
from windlass.targets.launch.decision import Done, budget_of, death_record, next_attempt


class AttemptHistory:
    """history.jsonl of a run, as its node 0 writes it."""

    def __init__(self, folder: RunFolder, run: Run) -> None:
        self.folder, self.run = folder, run
        self.end: Done | None = None
        self.backoff = 0.0
        self.submission = ""

    def open(self) -> None:
        """The run folder; raises UserError where it holds another run."""
        if self.folder.run_file.is_file() and self.folder.has_checkpoints():
            must_match(self.folder.load_run(), self.run, folder=str(self.folder.path))
        else:
            self.folder.create(self.run)
        self.folder.logs.mkdir(parents=True, exist_ok=True)

    def ended_before(self, submission: str) -> Done | None:
        """The end that this very submission has come to already: a pod made anew by its job has nothing to do."""
        ends = [one for one in read_json_lines(self.folder.history) if one.get("event") in ("exit", "launched")]
        if ends and ends[-1]["event"] == "exit" and ends[-1].get("job") == submission and submission:
            last = ends[-1]
            if last["state"] in ("failed", "finished"):
                return Done(last["state"], int(last["code"]), last.get("reason"))
        return None

    def launched(self, submission: str, nodes: Sequence[int], pods: Sequence[str]) -> int | None:
        """The number of the attempt that begins; None where too many came to nothing."""
        history = list(read_json_lines(self.folder.history))
        allowed = self.run.target.max_restarts
        attempt = next_attempt(history)
        used = budget_of([*history, {"event": "launched", "job": submission}], allowed).used
        if used > allowed:
            reason = f"given up after {used} restarts without a new checkpoint"
            self._finish(attempt - 1, Done("failed", ExitCode.FAILED, reason), submission)
            return None
        self.submission = submission
        earlier_marks = [one for one in history if one.get("event") in ("restart", "launched", "submitted")]
        before: dict[str, Any] = earlier_marks[-1] if earlier_marks else {}
        if before.get("event") == "launched" and before.get("job") == submission:  # by a pod that is gone
            self.folder.record("restart", attempt=attempt, why="the pod of node 0 was replaced", left=allowed - used)
        self.folder.record("launched", attempt=attempt, job=submission, nodes=list(nodes), pods=list(pods))
        return attempt

    def lost(self, attempt: int, node: int, pod: str, why: str) -> None:
        self.folder.record("node-lost", attempt=attempt, node=node, pod=pod, why=why)

    def conclude(self, attempt: int, ends: Sequence[NodeEnd], *, saving: str | None) -> Done | Again:
        """Decide what follows an attempt, and write it down."""
        history = list(read_json_lines(self.folder.history))
        begins = max(index for index, one in enumerate(history) if one.get("event") == "launched")
        budget = budget_of(history, self.run.target.max_restarts)
        decided = verdict(ends, history[begins:], budget, export=bool(self.run.checkpoint.export))
        if isinstance(decided, Again) and decided.free and saving:
            decided = Again(saving, free=True)
        preempted = any(one.get("event") == "preempted" for one in history[begins:])
        for index, (death, end) in enumerate(() if preempted else deaths_of(ends)):
            facts = death_record(death, end.errors, first=index == 0)
            self.folder.record("rank-died", attempt=attempt, node=end.node, **facts)
        if isinstance(decided, Done):
            self._finish(attempt, decided, self.submission)
        else:
            self.backoff = 0.0 if decided.free else 2.0**budget.used
            left = budget.left - (0 if decided.free else 1)
            self.folder.record("restart", attempt=attempt + 1, why=decided.why, left=max(0, left))
        return decided

    def _finish(self, attempt: int, done: Done, submission: str) -> None:
        if done.state == "failed":
            self.folder.record("gave-up", attempt=attempt, why=done.reason)
        self.folder.record("exit", state=done.state, code=int(done.code), reason=done.reason, job=submission)
        self.end = done
