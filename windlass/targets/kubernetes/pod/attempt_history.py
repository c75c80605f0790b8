"""What node 0 writes down of the attempts of a run, and what it concludes from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.spec.compatibility import must_match
from windlass.targets.kubernetes.pod.interface import AGAIN
from windlass.targets.kubernetes.pod.verdict import NodeEnd, deaths_of, verdict
from windlass.targets.launch.decision import Done, death_record, next_attempt, once_more, record_end

if TYPE_CHECKING:
    from windlass.diagnose.decision import Decision


class AttemptHistory:
    """history.jsonl of a run, as its node 0 writes it."""

    def __init__(self, folder: RunFolder, run: Run) -> None:
        self.folder, self.run = folder, run
        self.end: Done | None = None
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
        ends = [line for line in read_json_lines(self.folder.history) if line.get("event") in ("exit", "launched")]
        if ends and ends[-1]["event"] == "exit" and ends[-1].get("job") == submission and submission:
            last = ends[-1]
            if last["state"] in ("failed", "finished"):
                return Done(last["state"], int(last["code"]), last.get("reason"))
        return None

    def launched(self, submission: str, nodes: Sequence[int], pods: Sequence[str]) -> int | None:
        """The number of the attempt that begins; None where too many came to nothing."""
        from windlass.diagnose.decision import verdict_of

        history = list(read_json_lines(self.folder.history))
        attempt = next_attempt(history)
        self.submission = submission
        marks = [at for at, record in enumerate(history) if record.get("event") in ("restart", "launched", "submitted")]
        since: Sequence[Mapping[str, Any]] = history[marks[-1] :] if marks else ()
        if since and since[0].get("event") == "launched" and since[0].get("job") == submission:  # by a pod that is gone
            has_left = any(record.get("event") in ("preempted", "exit") for record in since)
            why = verdict_of("preempted" if has_left else "node_lost", "the pod of node 0 was replaced")
            decided = once_more(why, history, self.run.target.max_restarts)
            if isinstance(decided, Done):
                self._finish(attempt - 1, decided, submission)
                return None
            self.folder.record("restart", attempt=attempt, **decided.as_record())
        retried = {"retried": True} if submission.endswith(AGAIN) else {}
        self.folder.record("launched", attempt=attempt, job=submission, nodes=list(nodes), pods=list(pods), **retried)
        return attempt

    def lost(self, attempt: int, node: int, pod: str, why: str) -> None:
        self.folder.record("node-lost", attempt=attempt, node=node, pod=pod, why=why)

    def conclude(self, attempt: int, ends: Sequence[NodeEnd], *, saving: str | None) -> Done | Decision:
        """Decide what follows an attempt, and write it down."""
        history = list(read_json_lines(self.folder.history))
        begins = max(index for index, record in enumerate(history) if record.get("event") == "launched")
        max_restarts, export = self.run.target.max_restarts, bool(self.run.checkpoint.export)
        decided = verdict(ends, history[begins:], history, max_restarts, export=export)
        preempted = any(record.get("event") == "preempted" for record in history[begins:])
        for index, (death, end) in enumerate(() if preempted else deaths_of(ends)):
            facts = death_record(death, end.errors, first=index == 0)
            self.folder.record("rank-died", attempt=attempt, node=end.node, **facts)
        if isinstance(decided, Done):
            self._finish(attempt, decided, self.submission)
            return decided
        if saving and preempted:
            decided = replace(decided, reason=saving)
        self.folder.record("restart", attempt=attempt + 1, **decided.as_record())
        return decided

    def _finish(self, attempt: int, done: Done, submission: str) -> None:
        record_end(self.folder.record, attempt, done, job=submission)
        self.end = done
