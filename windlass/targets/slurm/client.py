"""Slurm runs: submit, status, logs, stop, list."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from windlass.catalog.instances import instance
from windlass.common.files import parse_record, write_atomically
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.spec import Run
from windlass.targets.launch.logs import follow_logs
from windlass.targets.launch.progress import recorded_end
from windlass.targets.launch.torchrun import Place
from windlass.targets.protocol import LOOP_VARIABLE, Detached, JobRef, JobStatus, LogLine, with_ranks
from windlass.targets.slurm import checks, queue, render, state, submission
from windlass.targets.slurm.commands import Commands, SilentError, ignored_options
from windlass.targets.slurm.queue import JOB_NUMBER
from windlass.targets.slurm.render import SlurmRequest

LOOP_FILE = "loop.json"
ASK_SECONDS = 2.0  # between two questions about one job: a controller serves many users
RETRY_SECONDS = 10.0  # before a Slurm that did not answer is asked again
POLL_SECONDS = 0.2
END_SECONDS = 90.0  # for Slurm to end a job it was told to


@dataclass
class SlurmTarget:
    """A Slurm cluster."""

    loop_notifies: ClassVar[bool] = False
    # when Slurm was asked, and what it said or that it did not answer
    _asked: dict[state.SubmittedJob, tuple[float, queue.QueuedJob | None]] = field(default_factory=dict)
    _silent: dict[str | None, tuple[float, SilentError]] = field(default_factory=dict)
    _partitions: dict[str | None, dict[str, queue.Partition]] = field(default_factory=dict)

    def offline(self) -> SlurmTarget:
        return OfflineSlurm()

    def settle(self, run: Run) -> Run:
        """One rank per GPU of a node; without GPUs, CPU processes that share the node's cores."""
        requested = run.resources
        num_gpus, threads = requested.gpus_per_node, requested.threads_per_process
        if num_gpus is None or threads is None:
            partition = checks.partition_of(run, self._partitions_of(run))
            if num_gpus is None:
                by_name = run.target.slurm.gres
                num_gpus = queue.parse_gpus(by_name) if by_name else partition.gpus_per_node
            num_ranks = num_gpus or requested.processes_per_node or 1
            threads = threads or max(1, partition.cpus_per_node // num_ranks)
        return with_ranks(run, num_gpus, threads)

    def check_run(self, run: Run) -> None:
        checks.limit_leaves_time(run)
        checks.has_an_environment(run)

    def gather(self, run: Run) -> Place:
        """Paths as the nodes find them; runs is absolute."""
        slurm = run.target.slurm
        if slurm.environment:
            python = f"{slurm.environment.rstrip('/')}/bin/python"
        else:
            python = "python3" if slurm.container else sys.executable
        return Place(runs=Path(os.path.abspath(runs_root())), working_directory=Path.cwd(), python=python)

    def render(self, run: Run, gathered: Place, *, faults: str | None = None) -> SlurmRequest:
        return render.render(run, gathered, faults=faults)

    def render_sweep(
        self, name: str, runs: Sequence[Run], indices: Sequence[int], gathered: Place, *, faults: str | None = None
    ) -> Sequence[SlurmRequest]:
        return render.render_sweep(name, runs, indices, gathered, faults=faults)

    def check(self, run: Run, request: SlurmRequest, *, bytes_needed: int | None) -> list[str]:
        if not request.host:
            Commands().must("sbatch", "--version")
        folder = RunFolder(request.folders[0])
        warnings = checks.check(run, folder, self._partitions_of(run), bytes_needed=bytes_needed)
        ignored = ignored_options(os.environ)
        if ignored:
            warnings.append(f"{', '.join(ignored)}: set here, and not used; what a run asks for is target.slurm.*")
        return warnings

    def submit(self, run: Run, request: SlurmRequest) -> JobRef:
        submission.submit([run], request, self._may_submit)
        return JobRef("slurm", run.name, RunFolder(request.folders[0]))

    def submit_all(self, runs: Sequence[Run], requests: Sequence[SlurmRequest]) -> list[JobRef]:
        """Submit the runs of a sweep; returns the jobs that are new. Those that are under way stay as they are."""
        named = {run.name: run for run in runs}
        made: list[JobRef] = []
        for request in requests:
            try:
                members = [named[folder.name] for folder in request.folders]
                made += submission.submit(members, request, self._may_submit)
            except UserError as error:
                if made:
                    names = ", ".join(job.name for job in made)
                    error.evidence = "\n".join(filter(None, (error.evidence, f"submitted before it: {names}")))
                    error.exit_code = ExitCode.FAILED
                raise
        return made

    def status(self, job: JobRef) -> JobStatus:
        submitted = state.SubmittedJob.of(job.folder)
        end = recorded_end(job.folder)
        if submitted is None:
            return end or JobStatus("waiting", reason="not submitted")
        if not submitted.belongs_to(job.folder):
            return end or state.status_of_copy(job.folder, submitted)
        if submitted.number is None:
            try:
                known = submission.find(job.folder, submitted)
            except SilentError as error:
                return state.status_of_unconfirmed(error)
            if known is None:
                return end or state.status_of_unconfirmed(None)
            submitted, end = known, None
        if end is not None:
            return self._decided_by_loop(job, end)
        try:
            status = state.status_of(job.folder, submitted, self._ask(submitted))
        except SilentError as error:
            status = state.status_without_slurm(job.folder, submitted, error)
        # it may have written down its end while Slurm was being asked
        return self._decided_by_loop(job, recorded_end(job.folder) or status) if status.ended else status

    def _decided_by_loop(self, job: JobRef, end: JobStatus) -> JobStatus:
        """A failure that the loop has yet to answer is not the end."""
        with contextlib.suppress(SilentError):
            if end.state == "failed" and self.has_loop(job):
                return replace(end, state="waiting", reason=f"{end.reason}; its retry loop decides", exit_code=None)
        return end

    def logs(self, job: JobRef, *, rank: int | None, follow: bool) -> Iterator[LogLine]:
        """Lines of one rank, or of all ranks; the launcher's where no rank has said anything."""
        launchers = {"slurm-*.out": "launcher", "launcher-*.log": "launcher"}
        return follow_logs(job.folder, rank, lambda: not follow or self.status(job).ended, launchers=launchers)

    def stop(self, job: JobRef, *, save_first: bool) -> JobStatus:
        """Stop a run and wait until it has stopped; with `save_first` the ranks get their grace period."""
        self._end_loop(job)  # first: it would answer the end by another job
        before = self.status(job)
        submitted = state.SubmittedJob.of(job.folder)
        if before.ended or submitted is None:
            return before
        if submitted.number is None:
            submitted = submission.find(job.folder, submitted)
        if submitted is None:
            submission.withdraw(job)
            return self.status(job)
        is_noted = _record(job.folder, "stop-requested", save_first=save_first)
        # its steps alone: the script lives on to write down how it ended. But it requeues a run that has saved, unless
        # it reads that an end was asked for
        steps_alone = is_noted and before.state == "running"
        try:
            if steps_alone:
                self._scancel(submitted, "--signal=TERM" if save_first else "--signal=KILL")
            else:
                self._scancel(submitted)
        except UserError as error:
            _record(job.folder, "stop-refused", why=error.what)  # or the next death would be taken for the end
            raise
        grace = job.folder.load_run().checkpoint.grace_seconds if save_first else END_SECONDS / 3
        overdue, deadline = time.monotonic() + grace, time.monotonic() + grace + END_SECONDS
        told_again = not steps_alone
        while not (now := self.status(job)).ended:
            if time.monotonic() > overdue and not told_again:
                told_again = True
                self._scancel(submitted)
            if time.monotonic() > deadline:
                raise UserError(
                    f"the run {job.name} has not stopped",
                    evidence=f"job {submitted.number} is still there: {now.reason or now.state}",
                    fix=f"scancel {submitted.number}",
                    exit_code=ExitCode.FAILED,
                )
            time.sleep(POLL_SECONDS)
        if recorded_end(job.folder) is None:
            _record(job.folder, "exit", state=now.state, code=now.exit_code, reason=now.reason)
        return now

    def render_loop(self, run: Run, gathered: Place, detached: Detached) -> str | None:
        if run.target.host:  # the nodes need not reach the login node as this machine does
            return None
        return render.render_loop(run, gathered, detached.arguments, python=sys.executable)

    def check_loop(self, run: Run, script: str) -> list[str]:
        answer = Commands().call("sbatch", "--test-only", text=script)
        if answer.code != 0:
            raise UserError(
                "Slurm would not take the retry loop",
                evidence=answer.complaint,
                cause="--detach submits a job of one core that begins if the run fails",
                fix="--no-retry    submits the run alone: its ranks are restarted in place, nothing else is tried",
            )
        return []

    def start_loop(self, job: JobRef, script: str) -> None:
        """Let the loop wait for the job's failure; Slurm drops it where the job ends well.

        What is about to be submitted is written down first: if this process is killed, its comment still tells of it.
        """
        submitted = state.SubmittedJob.of(job.folder)
        if submitted is None or submitted.number is None or self._has_loop(job, submission.IN_FLIGHT_SECONDS):
            return
        after = (f"--dependency=afternotok:{submitted.number}", "--kill-on-invalid-dep=yes")
        path = job.folder.path / LOOP_FILE
        former = _read_loop(path)
        # with the number of the loop that this may be a part of: until it ends, it may submit another
        intent = state.SubmittedJob(former.number if former else None, submission=secrets.token_hex(8))
        _write_loop(path, intent)
        try:
            number = submission.sbatch(SlurmRequest(script, (), None, None, options=after), intent)
        except submission.UnconfirmedError:
            raise
        except UserError as error:
            if former is None:
                path.unlink(missing_ok=True)  # `stop` may have been faster
            else:
                _write_loop(path, former)
            raise UserError(
                f"{job.name} is submitted, but its retry loop is not",
                evidence=error.evidence,
                fix="the same command again",
                exit_code=ExitCode.FAILED,
            ) from None
        if _read_loop(path) == intent:
            _write_loop(path, state.SubmittedJob(number))
        else:  # `stop` came meanwhile, and did not wait for as long as sbatch took
            self._scancel(state.SubmittedJob(number))

    def _end_loop(self, job: JobRef) -> None:
        """End the loop and wait until it is gone: it may be submitting the next job, with a loop of its own."""
        deadline = time.monotonic() + END_SECONDS
        path = job.folder.path / LOOP_FILE
        while (before := submission.content(path)) is not None:
            for number in self._loops_of(job, submission.IN_FLIGHT_SECONDS):
                self._scancel(state.SubmittedJob(number))
                while self._is_in_slurm(number):
                    if time.monotonic() > deadline:
                        raise UserError(
                            f"the retry loop of {job.name} has not ended",
                            evidence=f"job {number} is still there",
                            fix=f"scancel --full {number}",
                            exit_code=ExitCode.FAILED,
                        )
                    time.sleep(POLL_SECONDS)
            if submission.content(path) == before:
                path.unlink(missing_ok=True)

    def has_loop(self, job: JobRef) -> bool:
        return self._has_loop(job, 0.0)

    def _has_loop(self, job: JobRef, patience: float) -> bool:
        if os.environ.get(LOOP_VARIABLE) == job.name:
            return False
        return any(self._is_in_slurm(number) for number in self._loops_of(job, patience))

    def _is_in_slurm(self, number: str) -> bool:
        queued = self._ask(state.SubmittedJob(number))
        return queued is not None and queued.state in state.IN_QUEUE | state.ON_NODES

    def _loops_of(self, job: JobRef, patience: float) -> Iterator[str]:
        """The jobs of the run's loop: the recorded one; then the one whose number nobody wrote down, if there is one.

        A record without the number may be of a process that was killed a moment ago: within `patience` seconds its
        request still becomes a job.
        """
        path = job.folder.path / LOOP_FILE
        recorded = _read_loop(path)
        if recorded is not None and recorded.number is not None:
            yield recorded.number
        recorded = _read_loop(path)  # anew: the first may have submitted another since
        if recorded is not None and recorded.submission is not None:
            unconfirmed = submission.number_of(recorded, patience=patience)
            if unconfirmed is not None:
                yield unconfirmed

    def list(self) -> list[JobRef]:
        job_files = sorted(runs_root().glob(f"*/{state.JOB_FILE}"))
        return [JobRef("slurm", path.parent.name, RunFolder(path.parent)) for path in job_files]

    def collect(self, job: JobRef) -> dict[str, Any]:
        submitted = state.SubmittedJob.of(job.folder)
        if submitted is None or submitted.number is None:
            return {}
        return queue.collect(Commands(submitted.host), submitted.number)

    def collect_named(self, kind: str, name: str, place: str | None, namespace: str | None) -> dict[str, Any]:
        if kind != "job" or not JOB_NUMBER.fullmatch(name):
            raise UserError(f"{kind}/{name} is no job of Slurm", fix="windlass why job/NUMBER")
        return queue.collect_named(Commands(place), name)

    def _ask(self, job: state.SubmittedJob) -> queue.QueuedJob | None:
        """What Slurm says of a job. While it is silent it is not asked for every job, or `ls` would take minutes."""
        when, silent = self._silent.get(job.host, (float("-inf"), None))
        if silent is not None and time.monotonic() - when < RETRY_SECONDS:
            raise silent
        when, answer = self._asked.get(job, (float("-inf"), None))
        if time.monotonic() - when >= ASK_SECONDS:
            try:
                answer = queue.job(Commands(job.host), str(job.number))
            except SilentError as error:
                self._silent[job.host] = (time.monotonic(), error)
                raise
            self._asked[job] = (time.monotonic(), answer)
        return answer

    def _partitions_of(self, run: Run) -> dict[str, queue.Partition]:
        host = run.target.host
        if host not in self._partitions:
            self._partitions[host] = queue.partitions(Commands(host))
        return self._partitions[host]

    def _may_submit(self, job: JobRef) -> bool:
        """Whether no job may train in the folder, now or later. Raises where only Slurm could say, and it does not."""
        submitted = state.SubmittedJob.of(job.folder)
        if submitted is None or not submitted.belongs_to(job.folder):
            return True
        if submitted.number is None:
            submitted = submission.find(job.folder, submitted, patience=submission.IN_FLIGHT_SECONDS, is_locked=True)
        return submitted is None or self.status(job).ended

    def _scancel(self, job: state.SubmittedJob, *options: str) -> None:
        answer = Commands(job.host).call("scancel", *options, str(job.number))
        self._asked.pop(job, None)
        ended_meanwhile = queue.NO_SUCH_JOB in answer.err or "already completing" in answer.err
        if answer.code != 0 and not ended_meanwhile:
            raise UserError(
                f"job {job.number} could not be stopped", evidence=answer.complaint, exit_code=ExitCode.FAILED
            )


class OfflineSlurm(SlurmTarget):
    """Any cluster that has what the run file asks for."""

    def settle(self, run: Run) -> Run:
        requested = run.resources
        num_gpus, threads = requested.gpus_per_node, requested.threads_per_process
        kind = instance(requested.instance) if requested.instance else None
        if num_gpus is None and run.target.slurm.gres:
            num_gpus = queue.parse_gpus(run.target.slurm.gres)
        if num_gpus is None:
            num_gpus = kind.gpus if kind else None
        if num_gpus is None:
            raise UserError(
                "how many GPUs a node has is not known: no scheduler was asked, and the run file does not say",
                fix="resources.gpus_per_node=8    or 0 for CPUs, or resources.instance=TYPE",
            )
        if threads is None:
            threads = max(1, kind.vcpus // (num_gpus or requested.processes_per_node or 1)) if kind else 1
        return with_ranks(run, num_gpus, threads)

    def check_run(self, run: Run) -> None:
        """Nothing: limits and paths may still be completed where the script is submitted."""

    def check(self, run: Run, request: SlurmRequest, *, bytes_needed: int | None) -> list[str]:
        unknown = ["partitions, limits, free nodes and disk were not checked: no scheduler was asked"]
        if not run.resources.instance:
            unknown.append("CPU threads of a rank are as resources.threads_per_process says, 1 where it does not")
        return unknown


def _read_loop(path: Path) -> state.SubmittedJob | None:
    """The recorded loop; None where there is none, or what stands there was never written by windlass."""
    with contextlib.suppress(ValueError):
        return state.SubmittedJob.parse(parse_record(submission.content(path) or ""))
    return None


def _write_loop(path: Path, record: state.SubmittedJob) -> None:
    write_atomically(path, json.dumps(record.as_dict()) + "\n")


def _record(folder: RunFolder, event: str, **facts: Any) -> bool:
    """Whether it could be written down: the disk may be full, or the folder another user's."""
    try:
        folder.record(event, **facts)
    except OSError:
        return False
    return True
