"""Watch a job: its object, its pods and their events, kept up to date by one watch each."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from windlass.errors import UserError
from windlass.targets.kubernetes.api.errors import RefusedError, in_words
from windlass.targets.kubernetes.api.http import Api, GoneError, Halt, Object
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path
from windlass.targets.kubernetes.watch.pods import Pod, pod_of

RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0)
SHORT_SECONDS = 1.0  # a watch that ends sooner is ended by something other than its own timeout
HEALTHY_SECONDS = 20.0  # after which an earlier failure does not count any more
BLINK_SECONDS = 2.0  # a connection that is lost and made anew within this time is no news
PROBE_SECONDS = 6.0  # silence of all watches after which the API is asked whether it is there at all
ANSWER_SECONDS = 4.0  # and how long its answer may take


@dataclass
class JobSnapshot:
    """What is known of a job in its cluster at one moment."""

    job: Object | None = None  # without its spec, which may be large; None: it is not there
    pods: dict[str, Pod] = field(default_factory=dict)  # by uid
    trouble: str | None = None  # why the cluster cannot be asked at the moment, and since when
    note: str | None = None  # why what it says cannot be written down on this machine at the moment

    def now(self) -> list[Pod]:
        return sorted(self.pods.values(), key=lambda pod: (pod.node_rank is None, pod.node_rank or 0, pod.created))


def take_snapshot(api: Api, job: ClusterJob) -> JobSnapshot:
    """The state of this moment: one request for the job, and one for every 250 pods."""
    taken = JobSnapshot(job=without_spec(api.find(job.path), job))
    for value in api.items(job.pods_path, labelSelector=job.layout.selector):
        pod = pod_of(value, job.layout)
        taken.pods[pod.uid] = pod
    return taken


def without_spec(value: Object | None, job: ClusterJob) -> Object | None:
    """The job's own object: one of the same name that is not this job's is another's."""
    if value is None or (job.uid and value["metadata"].get("uid") != job.uid):
        return None
    return {key: value[key] for key in ("apiVersion", "kind", "metadata", "status") if key in value}


class Watched:
    """A list that is kept up to date by a watch, in a thread of its own.

    Nothing ends the thread but `halt`: whatever goes wrong is reported, waited on with back-off, and tried again.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        halt: Halt,
        *,
        listed: Callable[[list[Object]], None],
        changed: Callable[[str, Object], None],
        trouble: Callable[[str | None], None],
        reduce: Callable[[Object], Any] = lambda value: value,
        **params: str | int,
    ) -> None:
        self.api, self.path, self.halt, self.params = api, path, halt, params
        self.listed, self.changed, self.trouble, self.reduce = listed, changed, trouble, reduce
        self.ready = threading.Event()
        self.answered_at = 0.0  # when the server last answered
        self.thread = threading.Thread(target=self._keep, name=f"watch {path}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def _keep(self) -> None:
        version, failures = "", 0
        while not self.halt.requested:
            begin, ended_well = time.monotonic(), False
            try:
                if not version:
                    version = self._list()
                    self.ready.set()
                for change in self.api.watch(self.path, version, self.halt, opened=self._answered, **self.params):
                    self.answered_at = time.monotonic()
                    if change["type"] != "BOOKMARK":
                        self.changed(change["type"], change["object"])
                    version = change["object"]["metadata"]["resourceVersion"]
                ended_well = time.monotonic() - begin > SHORT_SECONDS
            except GoneError:
                version = ""
            except UserError as error:  # refused, unreachable, or without credentials
                self._report(error)
                if isinstance(error, RefusedError) and error.code in (401, 403):
                    self.ready.set()  # nobody need wait for the first list: the trouble says why there is none
                    failures = len(RETRY_SECONDS)
            except Exception as error:
                self._report(error)
                version = ""  # a change that could not be taken in is made up for by a new list
            if ended_well or time.monotonic() - begin > HEALTHY_SECONDS:
                failures = 0
            if not ended_well:
                self.halt.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1

    def _report(self, error: Exception) -> None:
        if not self.halt.requested:  # what breaks because everything ends is no trouble
            self.trouble(in_words(error))

    def _answered(self) -> None:
        self.answered_at = time.monotonic()
        self.trouble(None)

    def _list(self) -> str:
        items: list[Any] = []
        version = ""
        for page in self.api.pages(self.path, **self.params):
            items += [self.reduce(item) for item in page.get("items") or ()]
            version = page["metadata"]["resourceVersion"]
        self.listed(items)
        self._answered()
        return version


class JobWatch:
    """Follows the cluster until it is closed: three watches, however many pods there are."""

    def __init__(self, api: Api, job: ClusterJob, *, on_event: Callable[[Object], None] | None = None) -> None:
        self.api, self.job, self.halt = api, job, Halt()
        self._snapshot, self._lock = JobSnapshot(), threading.Lock()
        self._troubles: dict[str, tuple[str, float]] = {}  # by who has it: what it is, and since when
        self._on_event = on_event
        self.on_return: list[Callable[[], None]] = [self.halt.break_streams]  # for when a silent API is back
        self._prober = threading.Thread(target=self._probe, name="probe", daemon=True)
        self.changes = threading.Condition()
        namespace, name = job.namespace, job.object_name
        self._pods = Watched(
            api,
            job.pods_path,
            self.halt,
            listed=self._pods_listed,
            changed=self._pod_changed,
            trouble=lambda text: self._trouble("pods", text),
            reduce=self._pod,
            labelSelector=job.layout.selector,
        )
        self._job = Watched(
            api,
            object_path(job.api_version, job.plural, namespace),
            self.halt,
            listed=self._jobs_listed,
            changed=self._job_changed,
            trouble=lambda text: self._trouble("job", text),
            fieldSelector=f"metadata.name={name}",
        )
        self._events = Watched(
            api,
            object_path("v1", "events", namespace),
            self.halt,
            listed=self._events_listed,
            changed=lambda kind, value: self._event(value) if kind != "DELETED" else None,
            trouble=lambda _: None,  # whoever may not read events still sees pods
            reduce=lambda value: value if self._is_mine(value) else None,
        )

    def __enter__(self) -> JobWatch:
        for watched in (self._job, self._pods):
            watched.start()
        if self._on_event is not None:
            self._events.start()
        self._prober.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.halt.now()

    def wait_until_known(self, seconds: float) -> bool:
        """Until the first lists are there; False if the cluster does not give them."""
        deadline = time.monotonic() + seconds
        return all(watch.ready.wait(max(0.0, deadline - time.monotonic())) for watch in (self._job, self._pods))

    def read(self) -> JobSnapshot:
        with self._lock:
            trouble = None if self._job.ready.is_set() else "the cluster has not said yet what is there"
            for text, since in self._troubles.values():
                if trouble or time.time() - since > BLINK_SECONDS:
                    trouble = f"{text} since {time.strftime('%H:%M:%S', time.localtime(since))}"
                    break
            return JobSnapshot(self._snapshot.job, dict(self._snapshot.pods), trouble, self._snapshot.note)

    def note(self, text: str | None) -> None:
        """Say why this machine cannot write down what the cluster says; None when it can again."""
        with self._lock:
            self._snapshot.note = text

    def changed(self, seconds: float) -> Iterator[None]:
        """One turn for every change, and at least one in `seconds`, until it is closed."""
        while not self.halt.requested:
            yield
            with self.changes:
                self.changes.wait(seconds)

    def _pod(self, value: Object) -> Pod:
        return pod_of(value, self.job.layout)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[JobSnapshot]:
        """Change the snapshot, and wake whoever waits for changes."""
        with self._lock:
            yield self._snapshot
        with self.changes:
            self.changes.notify_all()

    def _pods_listed(self, pods: list[Any]) -> None:
        with self._changing() as snapshot:
            snapshot.pods = {pod.uid: pod for pod in pods}

    def _pod_changed(self, kind: str, value: Object) -> None:
        pod = self._pod(value)
        with self._changing() as snapshot:
            if kind == "DELETED":
                snapshot.pods.pop(pod.uid, None)
            else:
                snapshot.pods[pod.uid] = pod

    def _jobs_listed(self, jobs: list[Object]) -> None:
        with self._changing() as snapshot:
            snapshot.job = without_spec(jobs[0], self.job) if jobs else None

    def _job_changed(self, kind: str, value: Object) -> None:
        mine = without_spec(value, self.job)
        if mine is not None:
            with self._changing() as snapshot:
                snapshot.job = None if kind == "DELETED" else mine

    def _trouble(self, whose: str, text: str | None, since: float | None = None) -> None:
        with self._lock:
            if text is None:
                self._troubles.pop(whose, None)
            else:
                known = self._troubles.get(whose)
                self._troubles[whose] = (text, known[1] if known else since or time.time())

    def _probe(self) -> None:
        """Notice an API that is silent: its connections may look open for minutes, and no news look like good news."""
        answered, is_silent = time.monotonic(), False
        while not self.halt.wait(PROBE_SECONDS / 4):
            answered_at = max(answered, self._job.answered_at, self._pods.answered_at)
            if not is_silent and time.monotonic() - answered_at < PROBE_SECONDS:
                continue
            try:
                self.api.ask_whether_there(ANSWER_SECONDS)
            except Exception as error:
                is_silent = True
                self._trouble("probe", in_words(error), since=time.time() - (time.monotonic() - answered_at))
                continue
            answered = time.monotonic()
            self._trouble("probe", None)
            if is_silent:
                is_silent = False
                for call in list(self.on_return):
                    call()

    def _events_listed(self, events: list[Any]) -> None:
        for value in events:
            if value is not None:
                self._event(value)

    def _is_mine(self, value: Object) -> bool:
        about = value.get("involvedObject") or {}
        return self.job.names(str(about.get("name") or ""))

    def _event(self, value: Object) -> None:
        if self._on_event is not None and self._is_mine(value):
            self._on_event(value)
