"""The retry loop that `windlass run --detach` leaves in a cluster: started, read from anywhere, ended.

The loop writes every record of its own to a ConfigMap before it acts upon it. So a new pod of it goes on from the last
decision, a pod that was replaced finds out before it does anything, and other machines read what was done.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import yaml

from windlass.common.files import append_lines, parse_record, write_atomically
from windlass.common.locks import locked
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder
from windlass.spec import dump_run
from windlass.spec.loading import parse_run
from windlass.spec.run import NotifySection
from windlass.targets.kubernetes.api.errors import RefusedError, if_allowed
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path, plural_of
from windlass.targets.kubernetes.manifests.labels import DIGEST_ANNOTATION, DOMAIN, LOOP_LABEL
from windlass.targets.kubernetes.manifests.loop import HISTORY_KEY, SETTLED_KEY, Loop
from windlass.targets.kubernetes.manifests.render import QUEUE_LABEL
from windlass.targets.kubernetes.manifests.request import KubernetesRequest, Manifest, with_options
from windlass.targets.kubernetes.watch.pods import moment
from windlass.targets.kubernetes.watch.state import end_of
from windlass.targets.launch.notifications import Ledger, notices, receivers, settings_for
from windlass.targets.launch.tail import Tail
from windlass.targets.protocol import LOOP_VARIABLE

MARK = "loop.json"  # in a run folder: a loop in the cluster decides for the run
HOLDER = f"{DOMAIN}/loop-pod"  # which pod is the loop; one that was replaced is not
ENDED = f"{DOMAIN}/loop-ended"  # somebody has begun to end the loop, and may have been killed before its Job was gone
SENT_UNTIL = f"{DOMAIN}/sent-until"  # of the loop's Secret: the time of the newest event that people were told of
# What a client records of a run. Everything else in its history comes from the pods, which record it themselves.
CLIENT_EVENTS = ("submitted", "retry", "waits", "pod-removed", "settings-changed", "notice-failed")
MOST_BYTES = 700_000  # of records: a ConfigMap holds 1 MiB
GONE_SECONDS, POLL_SECONDS = 60.0, 0.5


# -- on the machine that leaves it there


def check(api: Api, loop: Loop) -> list[str]:
    """Raise what keeps the loop from being left there; return what it will have to do without."""
    warnings = []
    for manifest in (loop.account, *loop.objects):
        try:
            made = api.create(_place(manifest, loop.namespace), _sent(manifest, loop), dry_run=True)
            if manifest is loop.job and _is_suspended(made) and not (loop.queue or _queue_of(made)):
                warnings.append(
                    "this cluster holds every Job that is in no queue of Kueue: the retry loop will not run; "
                    "target.kubernetes.queue=NAME    puts it into one, with the run"
                )
        except RefusedError as error:
            if error.reason == "AlreadyExists":
                continue
            raise UserError(
                f"the retry loop cannot be left in the cluster: {error.what}",
                evidence=error.message,
                cause=f"--detach leaves a Job {loop.name} there, with a role in the namespace {loop.namespace} alone",
                fix=f"{error.fix or 'ask who administers the namespace'}\n"
                "--no-retry    leaves the run alone there: its ranks are restarted in place, nothing else is tried",
            ) from None
    try:
        for manifest in loop.for_nodes:
            _create_once(api, manifest, loop, dry_run=True)
    except RefusedError as error:
        if error.code != 403:
            raise
        warnings.append(
            "the retry loop will not see nodes, as you may not grant it that: a lost one is noticed minutes later, and "
            "too much memory asked stays so; --detach --dry-run prints the ClusterRole and its binding for who may"
        )
    return warnings


def start(api: Api, folder: RunFolder, loop: Loop) -> None:
    """Create the loop; one that is there already goes on, one that has ended or was told to makes way."""
    earlier = api.find(_job_path(loop.namespace, loop.name))
    if _decides(earlier):  # whoever began it may have been killed before all that its pod waits for was there
        _create_parts(api, loop, earlier, _create_once)
        mark(folder)
        return
    if earlier is not None:
        remove(api, loop.namespace, loop.name)
    for manifest in loop.for_nodes:
        try:
            _create_once(api, manifest, loop)
        except RefusedError as error:
            if error.code != 403:  # `check` has said so
                raise
    _create_once(api, loop.account, loop)
    job = api.create(_place(loop.job, loop.namespace), loop.job)
    try:
        if _is_suspended(job) and loop.queue and not _queue_of(job):  # Kueue manages every Job here
            api.patch(_job_path(loop.namespace, loop.name), {"metadata": {"labels": {QUEUE_LABEL: loop.queue}}})
        _create_parts(api, loop, job, _create)
    except BaseException:
        remove(api, loop.namespace, loop.name)
        raise
    mark(folder)


def _create_parts(api: Api, loop: Loop, job: Object, create: Callable[[Api, Manifest, Loop], None]) -> None:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": loop.name, "uid": job["metadata"]["uid"]}
    for manifest in loop.objects[1:]:
        owned = {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}
        create(api, _sent(owned, loop), loop)


def end(api: Api, folder: RunFolder, job: ClusterJob) -> None:
    """End the loop of a run; what it did last is in the folder then."""
    path = _job_path(job.namespace, job.loop_name)
    value = if_allowed(api.find, path)
    if value is None:
        forget(folder)
        return
    if end_of(value) is None:
        # its pod goes, its records stay; Kueue would undo a suspension
        api.patch(path, {"metadata": {"annotations": {ENDED: "true"}}, "spec": {"parallelism": 0}})
        _wait_until_gone(api, job.namespace, job.loop_name)
    pull(api, folder, job)
    remove(api, job.namespace, job.loop_name)
    forget(folder)


def remove(api: Api, namespace: str, name: str) -> None:
    api.delete(_job_path(namespace, name))
    _wait_until_gone(api, namespace, name)
    selector = f"{LOOP_LABEL}={name.removesuffix('-loop')}"
    for plural in ("configmaps", "secrets"):  # the garbage collector takes them later, and a new loop wants their names
        for value in list(api.items(object_path("v1", plural, namespace), labelSelector=selector)):
            api.delete(object_path("v1", plural, namespace, value["metadata"]["name"]))
    for plural in ("rolebindings", "roles"):
        api.delete(object_path("rbac.authorization.k8s.io/v1", plural, namespace, name))


def _wait_until_gone(api: Api, namespace: str, name: str) -> None:
    """Until no pod of the loop is there: from then on it submits nothing."""
    path, selector = object_path("v1", "pods", namespace), f"{LOOP_LABEL}={name.removesuffix('-loop')}"
    deadline = time.monotonic() + GONE_SECONDS
    while alive := [pod for pod in api.items(path, labelSelector=selector) if _is_alive(pod)]:
        if time.monotonic() > deadline:
            pod = alive[0]["metadata"]["name"]
            raise UserError(
                f"the retry loop {name} does not leave the cluster",
                evidence=f"its pod {pod} is still there",
                fix=f"kubectl -n {namespace} delete pod {pod} --force --grace-period=0",
                exit_code=ExitCode.FAILED,
            )
        time.sleep(POLL_SECONDS)


# -- on every machine that looks at the run


def is_marked(folder: RunFolder) -> bool:
    return (folder.path / MARK).is_file()


def forget(folder: RunFolder) -> None:
    (folder.path / MARK).unlink(missing_ok=True)


def is_active(api: Api, job: ClusterJob) -> bool:
    """Whether a loop decides what follows; one that has ended, or was told to, does not."""
    return _decides(api.find(_job_path(job.namespace, job.loop_name)))


def adopt(api: Api, folder: RunFolder, job: ClusterJob) -> None:
    """For a run folder that was just made: remember that a loop decides for the run, where there is one."""
    if if_allowed(api.find, _job_path(job.namespace, job.loop_name)) is not None:
        mark(folder)


def pull(api: Api, folder: RunFolder, job: ClusterJob) -> ClusterJob:
    """Take over what the loop did: its records, its edits of the run, and its newest job."""
    value = api.find(object_path("v1", "configmaps", job.namespace, job.loop_name))
    data = (value or {}).get("data") or {}
    with locked(folder.path / f".{MARK}.lock", patience_s=0) as is_mine:
        known = set(folder.history.read_text().splitlines()) if folder.history.is_file() else set()
        new = [line for line in str(data.get(HISTORY_KEY) or "").splitlines() if line not in known]
        if is_mine and new:  # else another command takes them over at this moment
            append_lines(folder.history, new)
    if data.get(SETTLED_KEY):
        run, before = parse_run(yaml.safe_load(data[SETTLED_KEY]), source=SETTLED_KEY), folder.load_run()
        mine = {key: getattr(before.target.kubernetes, key) for key in ("context", "namespace")}
        run = with_options(run, **mine)
        if run != before:
            write_atomically(folder.run_file, dump_run(run))
    current = api.find(job.path)
    if current is None or current["metadata"]["uid"] == job.uid:
        return job
    digest = str((current["metadata"].get("annotations") or {}).get(DIGEST_ANNOTATION) or "")
    newest = replace(job, uid=current["metadata"]["uid"], digest=digest, submission="", ended=False)
    newest.write(folder)
    return newest


def is_left(api: Api, request: KubernetesRequest) -> bool:
    """Whether a loop decides for the run that somebody is about to submit, from here or from another machine."""
    if os.environ.get(LOOP_VARIABLE) == request.name:
        return False  # it is this one
    # who may not read Jobs has left none
    return _decides(if_allowed(api.find, _job_path(request.namespace, f"{request.object_name}-loop")))


def in_the_way(api: Api, request: KubernetesRequest) -> UserError:
    """It would take a new job for the one that it is about to answer."""
    return UserError(
        f"a retry loop in the cluster decides for the run {request.name}",
        error_code="under-way",
        evidence=f"Job {request.object_name}-loop in the namespace {request.namespace}",
        fix=f"windlass stop {request.name} --on kubernetes:{api.access.context}    and then this again; or name=OTHER",
    )


def trouble(api: Api, job: ClusterJob) -> str | None:
    """Why the loop itself does not run, where that is so."""
    value = api.find(_job_path(job.namespace, job.loop_name))
    if value is not None and _is_suspended(value):
        where = f"the queue {_queue_of(value)}" if _queue_of(value) else "a queue, and it is in none"
        return f"the retry loop does not run: Kueue holds its Job {job.loop_name} until it is admitted by {where}"
    for pod in api.items(job.pods_path, labelSelector=f"{LOOP_LABEL}={job.object_name}"):
        for container in (pod.get("status") or {}).get("containerStatuses") or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                name, why = pod["metadata"]["name"], waiting.get("message") or waiting["reason"]
                return f"the retry loop does not run: {why}; kubectl -n {job.namespace} logs {name}"
    return None


# -- in the loop's own pod


class ReplacedError(Exception):
    """Another pod is the loop now."""


@dataclass
class LoopRecords:
    """The loop's records: in its run folder, and before that in the cluster."""

    api: Api
    folder: RunFolder
    name: str
    pod: str  # uid of this one
    _lines: list[str] = field(default_factory=list)
    _saved: set[str] = field(default_factory=set)  # also those that no longer fit

    @property
    def _path(self) -> str:
        return object_path("v1", "configmaps", self.api.access.namespace, self.name)

    def claim(self) -> None:
        """Become the loop, with the records that the one before has left; all else is read anew from the pods."""
        value = self.api.get(self._path)
        self._write(value, {})
        self._lines = str((value.get("data") or {}).get(HISTORY_KEY) or "").splitlines()
        self._saved = set(self._lines)
        shutil.rmtree(self.folder.path, ignore_errors=True)
        self.folder.logs.mkdir(parents=True)
        write_atomically(self.folder.history, "".join(f"{line}\n" for line in self._lines))

    def record(self, event: str, **facts: Any) -> None:
        """Write down what was decided, before it is acted upon. Raises ReplacedError where another pod decides."""
        facts = {"time": round(time.time(), 3), "event": event, **facts}
        line = json.dumps(facts, separators=(",", ":"), default=str)
        self._save([*self._unsaved(), line])
        append_lines(self.folder.history, [line])

    def push(self) -> None:
        """What the target wrote down itself: submissions, pods that it took out, and the settings that hold now.

        Raises ReplacedError where another pod decides, also where there is nothing new.
        """
        self._save(self._unsaved())

    def _unsaved(self) -> list[str]:
        return [line for line in _client_records(self.folder) if line not in self._saved]

    def _save(self, lines: Sequence[str]) -> None:
        value = self.api.get(self._path)
        if ((value["metadata"].get("annotations")) or {}).get(HOLDER) != self.pod:
            raise ReplacedError
        self._lines = _fitting([*self._lines, *lines])
        self._saved.update(lines)
        data = {HISTORY_KEY: "".join(f"{line}\n" for line in self._lines)}
        if self.folder.run_file.is_file():
            data[SETTLED_KEY] = self.folder.run_file.read_text()
        self._write(value, data)

    def _write(self, value: Object, data: dict[str, str]) -> None:
        metadata = {"resourceVersion": value["metadata"]["resourceVersion"], "annotations": {HOLDER: self.pod}}
        try:
            self.api.patch(self._path, {"metadata": metadata, **({"data": data} if data else {})})
        except RefusedError as error:
            if error.code == 409:
                raise ReplacedError from None
            raise


class LoopNotices:
    """Tells people what happens to the run while the loop decides; nothing where its Secret names nobody.

    How far it came is written on that Secret, for the next pod of the loop, and not on the ConfigMap, whose version
    tells a pod that it was replaced.
    """

    def __init__(self, api: Api, folder: RunFolder, loop: str) -> None:
        self._api, self._run, self._path = api, folder.name, object_path("v1", "secrets", api.access.namespace, loop)
        section = settings_for(NotifySection())
        self._events, self._to = section.events, receivers(section)
        self._history, self._ended = Tail(folder.history), threading.Event()
        if self._to:
            metadata = api.get(self._path)["metadata"]
            until = (metadata.get("annotations") or {}).get(SENT_UNTIL)
            created = moment(metadata.get("creationTimestamp")) or time.time()
            self._ledger = Ledger(folder, since=float(until) + 0.001 if until else created)
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Send what is left."""
        if self._to:
            self._ended.set()
            self._thread.join()
            self._send()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self._send()

    def _send(self) -> None:
        for notice in notices(self._run, self._history.records()):
            sent, failed = self._ledger.send_new([notice], self._events, self._to)
            for problem in failed:
                print(f"warning: {problem}", file=sys.stderr)
            if sent or failed:
                with contextlib.suppress(UserError):  # told again by the next pod, at worst
                    self._api.patch(self._path, {"metadata": {"annotations": {SENT_UNTIL: str(notice.time)}}})


def records_for_loop(folder: RunFolder) -> str:
    """What a loop has to know of what was done before it."""
    return "".join(f"{line}\n" for line in _fitting(_client_records(folder)))


def _fitting(lines: list[str]) -> list[str]:
    """As many of the newest as fit."""
    size, kept = 0, 0
    for line in reversed(lines):
        size += len(line.encode()) + 1
        if size > MOST_BYTES:
            break
        kept += 1
    return lines[len(lines) - kept :]


def _client_records(folder: RunFolder) -> list[str]:
    """What clients recorded, and before each of it the newest checkpoint: progress fills budgets up again."""
    records, saved = [], ""
    for line in folder.history.read_text().splitlines() if folder.history.is_file() else ():
        event = (parse_record(line) or {}).get("event")
        if event == "checkpoint":
            saved = line
        elif event in CLIENT_EVENTS:
            records += [saved, line] if saved else [line]
            saved = ""
    return [*records, saved] if saved else records


def mark(folder: RunFolder) -> None:
    write_atomically(folder.path / MARK, "{}\n")


def _is_alive(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def _decides(value: Object | None) -> TypeGuard[Object]:
    """A loop that Kueue has not admitted yet decides later; one that somebody has begun to end never does."""
    if value is None or end_of(value) is not None or value["metadata"].get("deletionTimestamp"):
        return False
    return ENDED not in (value["metadata"].get("annotations") or {})


def _is_suspended(job: Object) -> bool:
    return bool((job.get("spec") or {}).get("suspend"))


def _queue_of(job: Object) -> str | None:
    return (job["metadata"].get("labels") or {}).get(QUEUE_LABEL)


def _create(api: Api, manifest: Manifest, loop: Loop, *, dry_run: bool = False) -> None:
    api.create(_place(manifest, loop.namespace), manifest, dry_run=dry_run)


def _create_once(api: Api, manifest: Manifest, loop: Loop, *, dry_run: bool = False) -> None:
    try:
        _create(api, manifest, loop, dry_run=dry_run)
    except RefusedError as error:
        if error.reason != "AlreadyExists":
            raise


def _sent(manifest: Manifest, loop: Loop) -> Manifest:
    return {**manifest, "stringData": dict(loop.secret_values)} if manifest["kind"] == "Secret" else manifest


def _place(manifest: Manifest, namespace: str) -> str:
    is_of_cluster = manifest["kind"].startswith("Cluster")
    return object_path(manifest["apiVersion"], plural_of(manifest["kind"]), None if is_of_cluster else namespace)


def _job_path(namespace: str, name: str) -> str:
    return object_path("batch/v1", "jobs", namespace, name)
