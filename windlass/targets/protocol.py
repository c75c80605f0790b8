"""What every place a run can go to offers: a few verbs, and small protocols for what only some of them can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from windlass.runfolder import RunFolder

if TYPE_CHECKING:
    from windlass.catalog.gpus import Gpu
    from windlass.checkpoint import Checkpoint
    from windlass.spec import Run

State = Literal["waiting", "running", "finished", "failed", "preempted", "stopped"]
LOOP_VARIABLE = "WINDLASS_LOOP"  # in a retry loop that goes on without a client: the run's name
ENDED: frozenset[State] = frozenset(("finished", "failed", "preempted", "stopped"))


@dataclass(frozen=True)
class JobRef:
    """A job, as its target finds it again."""

    target: str
    name: str
    folder: RunFolder


@dataclass(frozen=True)
class JobStatus:
    """Where a job stands. Everything but the state may be unknown."""

    state: State
    step: int | None = None
    steps: int | None = None
    attempt: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    eta: float | None = None  # seconds
    reason: str | None = None
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LogLine:
    rank: int | None  # None: the launcher's own
    text: str
    source: str = "launcher"  # who says it where no rank does


@dataclass(frozen=True)
class PodRow:
    """A pod of a job, for a table: what it does, why, and for how long."""

    name: str
    phase: str
    reason: str
    message: str
    age: float  # seconds
    node: str
    restarts: int
    ranks: tuple[int, ...]


class Request(Protocol):
    """What would be sent to a target. It prints itself, and what is printed is what is sent."""

    def __str__(self) -> str: ...
    def as_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Request)


class Target(Protocol[R]):
    """A place where runs go."""

    def settle(self, run: Run) -> Run:
        """The run with what this place decides filled in: how many ranks of which kind."""

    def check_run(self, run: Run) -> None:
        """Raise the UserError for what a settled run can never do here. Asks nobody."""

    def gather(self, run: Run) -> Any:
        """What rendering needs beside the run: facts of the place, files, secrets, random numbers. Creates nothing."""

    def render(self, run: Run, gathered: Any, *, faults: str | None = None) -> R:
        """The request for a settled, resolved run. Pure."""

    def check(self, run: Run, request: R, *, bytes_needed: int | None) -> list[str]:
        """Raise the UserError that submitting this request would meet; return warnings. Creates nothing."""

    def submit(self, run: Run, request: R) -> JobRef: ...
    def status(self, job: JobRef) -> JobStatus: ...
    def logs(self, job: JobRef, *, rank: int | None, follow: bool) -> Iterator[LogLine]: ...
    def stop(self, job: JobRef, *, save_first: bool) -> JobStatus: ...
    def list(self) -> Sequence[JobRef]: ...


def world_size(run: Run) -> int:
    """Ranks of a settled run."""
    return (run.resources.processes_per_node or 1) * run.resources.nodes


def with_ranks(run: Run, num_gpus: int | None, threads: int | None) -> Run:
    """The run with its ranks counted: one per GPU of a node, or CPU processes."""
    num_ranks = num_gpus or run.resources.processes_per_node or 1
    update = {"gpus_per_node": num_gpus, "processes_per_node": num_ranks, "threads_per_process": threads}
    return run.model_copy(update={"resources": run.resources.model_copy(update=update)})


@runtime_checkable
class KnowsHardware(Protocol):
    """A target that can say before a run what its ranks will get."""

    def gpu(self, run: Run) -> Gpu | None: ...
    def host_memory(self, run: Run) -> int | None: ...


@runtime_checkable
class RendersOffline(Protocol):
    """A target that can render a run without asking the cluster or scheduler."""

    def offline(self) -> Target[Any]: ...


@runtime_checkable
class SubmitsOnce(Protocol):
    """A target that can tell whether a job under way is the very one that is asked for."""

    def attach(self, run: Run, request: Any) -> JobRef: ...


@runtime_checkable
class CanWithdraw(Protocol):
    """A target that can take a job back which does not train, to make room for another of its name."""

    def withdraw(self, job: JobRef) -> None: ...


@dataclass(frozen=True)
class Detached:
    """What the retry loop of a run needs to go on without its client."""

    run_file: str
    changes: Sequence[str]
    patience: float
    faults: str | None
    asked: Run  # what the two describe, before anything is filled in

    @property
    def arguments(self) -> list[str]:
        """Of `windlass`, in a loop on a machine that has the same files."""
        inject = ["--inject", self.faults] if self.faults else []
        return ["run", self.run_file, *self.changes, "--patience", f"{self.patience:g}", *inject, "--loop"]


@runtime_checkable
class KeepsLoop(Protocol):
    """A target where the retry loop of a run goes on without its client, beside the job."""

    loop_notifies: ClassVar[bool]
    """Whether the loop tells people what happens to the run; else a process on the submitting machine does."""

    def render_loop(self, run: Run, gathered: Any, detached: Detached) -> Any:
        """What is started; None where a loop would have nothing to do."""

    def check_loop(self, run: Run, loop: Any) -> list[str]:
        """Raise the UserError that starting the loop would meet; return warnings. Creates nothing."""

    def start_loop(self, job: JobRef, loop: Any) -> None: ...
    def has_loop(self, job: JobRef) -> bool:
        """Whether such a loop decides what follows, and not whoever asks."""


@runtime_checkable
class CanSweep(Protocol):
    """A target that takes many runs, which differ in a few keys, as few requests; it returns the jobs that are new."""

    def render_sweep(
        self, name: str, runs: Sequence[Run], indices: Sequence[int], gathered: Any, *, faults: str | None = None
    ) -> Sequence[Any]: ...
    def submit_all(self, runs: Sequence[Run], requests: Sequence[Any]) -> Sequence[JobRef]: ...


@runtime_checkable
class RunsInPods(Protocol):
    """A target whose jobs consist of pods, in which commands can be run."""

    def pods(self, job: JobRef) -> Sequence[PodRow]: ...
    def exec(self, job: JobRef, rank: int, command: Sequence[str]) -> int: ...


@runtime_checkable
class KeepsRunFolder(Protocol):
    """A target whose ranks write to a run folder of its own: this machine's fills while it is followed."""

    def following(self, job: JobRef) -> AbstractContextManager[None]: ...
    def checkpoints(self, job: JobRef) -> Sequence[dict[str, Any]]: ...
    def fetch_checkpoint(self, job: JobRef, step: int | None, to: Path) -> Checkpoint: ...
    def start_afresh(self, run: Run, request: Any) -> str | None:
        """Move that run folder aside; its new name."""


@runtime_checkable
class KnowsItsJobs(Protocol):
    """A target that keeps its jobs itself: they are found from a machine that has no folder of theirs."""

    def elsewhere(self, place: str | None) -> Iterator[tuple[str, JobStatus]]: ...
    def adopt(self, name: str, place: str | None) -> JobRef: ...


@runtime_checkable
class KnowsFacts(Protocol):
    """A target that can say what it knows about a job, its own or anybody's, for a diagnosis."""

    def collect(self, job: JobRef) -> dict[str, Any]: ...
    def collect_named(self, kind: str, name: str, place: str | None, namespace: str | None) -> dict[str, Any]:
        """The facts of a job that windlass did not launch. Raises the UserError where there is none."""
