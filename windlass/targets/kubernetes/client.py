"""Kubernetes jobs: submit, status, logs, stop, list; exec, events, and what pods do."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from windlass.catalog.gpus import Gpu, gpu_of_device
from windlass.catalog.instances import instance
from windlass.checkpoint import Checkpoint
from windlass.common.files import read_json_lines
from windlass.diagnose.decision import last_mark
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.spec import Run
from windlass.targets.kubernetes import checks, collecting, lookup, loop, submission
from windlass.targets.kubernetes.api import discovery
from windlass.targets.kubernetes.api.errors import RefusedError, UnreachableError, in_words
from windlass.targets.kubernetes.api.execution import interactively
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access
from windlass.targets.kubernetes.checkpoints import fetch, list_in_cluster, reader_pod
from windlass.targets.kubernetes.jobfile import JOB_FILE, ClusterJob
from windlass.targets.kubernetes.manifests import render
from windlass.targets.kubernetes.manifests.cluster_facts import ALWAYS, ClusterFacts, JobKind, ServedKind
from windlass.targets.kubernetes.manifests.code import Carried, gather
from windlass.targets.kubernetes.manifests.labels import DIGEST_ANNOTATION
from windlass.targets.kubernetes.manifests.loop import Loop, render_loop
from windlass.targets.kubernetes.manifests.pod import is_shared
from windlass.targets.kubernetes.manifests.request import KubernetesRequest
from windlass.targets.kubernetes.manifests.validation import validate
from windlass.targets.kubernetes.pod.interface import AGAIN, RUNS
from windlass.targets.kubernetes.pod_scripts import PodScripts, filler
from windlass.targets.kubernetes.stopping import remove
from windlass.targets.kubernetes.watch import archive, following, job_watch, logs, state
from windlass.targets.kubernetes.watch.pods import Pod, newest_by_node, row_of
from windlass.targets.kubernetes.watch.recovery import Recovery
from windlass.targets.kubernetes.watch.waiting import Waiting
from windlass.targets.launch import notifications
from windlass.targets.launch.logs import follow_logs
from windlass.targets.launch.progress import recorded_end
from windlass.targets.protocol import Detached, JobRef, JobStatus, LogLine, PodRow

ASK_SECONDS = 2.0  # between two questions about one job that nobody follows
GPU_LABEL = "nvidia.com/gpu.product"


@dataclass(frozen=True)
class Gathered:
    """What rendering needs beside the run."""

    cluster: ClusterFacts
    carried: Carried
    submission: str  # marks the pods of one submission


@dataclass
class KubernetesTarget:
    """The clusters of a kubeconfig."""

    loop_notifies: ClassVar[bool] = True
    _apis: dict[tuple[str | None, str | None], Api] = field(default_factory=dict)
    _facts: dict[tuple[str | None, str | None, str | None], ClusterFacts] = field(default_factory=dict)
    _following: dict[str, following.Following] = field(default_factory=dict)  # by run folder
    _waiting: dict[str, Waiting] = field(default_factory=dict)  # by job uid
    _recovery: dict[str, Recovery] = field(default_factory=dict)  # by job uid
    _asked: dict[str, tuple[float, job_watch.JobSnapshot]] = field(default_factory=dict)
    _loops: dict[str, tuple[float, bool]] = field(default_factory=dict)  # by run folder: when asked, and the answer

    def offline(self) -> KubernetesTarget:
        from windlass.targets.kubernetes.offline import OfflineKubernetes  # which is one of these

        return OfflineKubernetes()

    def settle(self, run: Run) -> Run:
        """One rank per GPU of a node, as the instance type, the cluster's nodes or the job that is under way tell."""
        cluster = self.facts(run)
        kind = render.pick(run, cluster.served)
        return render.settle(submission.as_under_way(self._api(run), run, self._served(run, kind)), cluster)

    def gpu(self, run: Run) -> Gpu | None:
        """The GPU of a settled run's ranks; None on CPUs, and where neither catalogue nor nodes know it."""
        if not run.resources.gpus_per_node:
            return None
        if run.resources.instance:
            return instance(run.resources.instance).gpu
        products = {node.labels[GPU_LABEL] for node in self.facts(run).nodes if GPU_LABEL in node.labels}
        return gpu_of_device(products.pop()) if len(products) == 1 else None

    def host_memory(self, run: Run) -> int | None:
        """Not known: pods without GPUs get what their node has."""
        return None

    def check_run(self, run: Run) -> None:
        render.check(run, render.pick(run, self.facts(run).served))

    def gather(self, run: Run) -> Gathered:
        """What the cluster has, and the code and secrets that go with the job; each submission has a new secret."""
        history = list(read_json_lines(RunFolder.of(run).history))
        again = AGAIN if last_mark(history, without_edits=True) == "retry" else ""
        return Gathered(self.facts(run), gather(run, os.environ), f"{secrets.token_hex(4)}{again}")

    def render(self, run: Run, gathered: Gathered, *, faults: str | None = None) -> KubernetesRequest:
        return render.render(run, gathered.cluster, gathered.carried, submission=gathered.submission, faults=faults)

    def check(self, run: Run, request: KubernetesRequest, *, bytes_needed: int | None) -> list[str]:
        served = self._served(run, request.kind)
        validate(request.objects, self.facts(run).served)
        return checks.check(self._api(run), run, request, served, bytes_needed=bytes_needed)

    def submit(self, run: Run, request: KubernetesRequest) -> JobRef:
        """Create the objects; the job of the very same request that is under way is taken as it is."""
        api, served, folder = self._api(run), self._served(run, request.kind), RunFolder.of(run)
        has_loop = loop.is_left(api, request)
        if has_loop and submission.under_way(api, request, served) is None:
            raise loop.in_the_way(api, request)
        made, take_back = submission.submit(api, request, served, lambda: self._read_last_logs(api, folder))
        try:
            earlier = ClusterJob.of(folder)
            folder.create(run)
            made.write(folder)
            if has_loop:
                loop.mark(folder)
            if earlier is None or earlier.uid != made.uid:
                folder.record("submitted", job=made.object_name, host=made.context, kind=str(made.kind))
        except BaseException:  # a full disk, Ctrl-C: no job trains that this machine does not know of
            take_back()
            raise
        return JobRef("kubernetes", run.name, folder)

    def attach(self, run: Run, request: KubernetesRequest) -> JobRef:
        """The job that is under way, if it is the one that is asked for."""
        submission.under_way(self._api(run), request, self._served(run, request.kind))
        return JobRef("kubernetes", run.name, RunFolder.of(run))

    def start_afresh(self, run: Run, request: KubernetesRequest) -> str | None:
        """Give the run folder in the cluster another name, so that nothing is resumed from it; its new name."""
        api = self._api(run)
        if submission.under_way(api, request, self._served(run, request.kind)) is not None:
            raise UserError(
                f"the run {run.name} is under way", fix=f"windlass stop {run.name}    and then --fresh again"
            )
        if loop.is_left(api, request):
            raise loop.in_the_way(api, request)
        if not is_shared(run):
            return None
        with reader_pod(api, run, read_only=False) as scripts:
            aside: str | None = scripts.ask("move_aside", f"{RUNS}/{run.name}")["name"]
        return aside

    def status(self, job: JobRef) -> JobStatus:
        cluster_job = ClusterJob.of(job.folder)
        if cluster_job is None:
            return JobStatus("waiting", reason="not submitted")
        has_loop = self.has_loop(job)
        cluster_job = self._must_have(job)  # the loop may have replaced it
        recorded = recorded_end(job.folder)
        if cluster_job.ended and recorded is not None and not has_loop:
            return recorded
        seen = self._snapshot(job, cluster_job)
        self._recover(job, cluster_job, seen)
        status = self._status(job, cluster_job, seen)
        if status.ended and has_loop and status.state != "finished":
            why = f"{status.state}: {status.reason or 'no reason is known'}; the retry loop in the cluster decides"
            return replace(status, state="waiting", reason=why, exit_code=None)
        if status.ended:
            return self._confirm_end(job, cluster_job, seen)
        if has_loop and status.state == "waiting":
            stuck = loop.trouble(self._api_of(cluster_job), cluster_job)
            status = replace(status, reason="; ".join(text for text in (status.reason, stuck) if text))
        if seen.note:
            status = replace(status, reason="; ".join(text for text in (status.reason, seen.note) if text))
        return status

    def logs(self, job: JobRef, *, rank: int | None, follow: bool) -> Iterator[LogLine]:
        """Lines of one rank, or of all ranks; the launchers' where no rank has said anything."""
        with contextlib.ExitStack() as stack:
            if follow:
                stack.enter_context(self.following(job))
            else:
                self._read_logs(job, rank)
            launchers = {"launcher*.log": "launcher"}
            yield from follow_logs(job.folder, rank, lambda: not follow or self.status(job).ended, launchers=launchers)

    def stop(self, job: JobRef, *, save_first: bool) -> JobStatus:
        """Delete the job with all that belongs to it; with `save_first` the ranks get their grace period.

        What an ended job has left in the cluster goes too, once its logs are here.
        """
        loop.end(*self._loop_of(job))
        api, cluster_job = self.cluster(job)
        before = self.status(job)
        run = job.folder.load_run()
        if before.ended:
            self._read_logs(job, None)
        else:
            job.folder.record("stop-requested", save_first=save_first)
        with contextlib.nullcontext() if before.ended else self.following(job):
            grace = run.checkpoint.grace_seconds + 60.0
            remove(api, cluster_job, name=job.name, grace=grace, save_first=save_first and not before.ended)
            if before.ended:
                return before
            # nothing of it is left, whether or not this user may watch the cluster say so
            return self._confirm_end(job, cluster_job, job_watch.JobSnapshot())

    def render_loop(self, run: Run, gathered: Gathered, detached: Detached) -> Loop:
        return render_loop(
            run,
            detached.asked,
            render.pick(run, gathered.cluster.served),
            gathered.cluster,
            gathered.carried,
            patience=detached.patience,
            faults=detached.faults,
            history=loop.records_for_loop(RunFolder.of(run)),
            notify=notifications.carried(run.notify),
        )

    def check_loop(self, run: Run, loop_request: Loop) -> list[str]:
        return loop.check(self._api(run), loop_request)

    def start_loop(self, job: JobRef, loop_request: Loop) -> None:
        loop.start(self.cluster(job)[0], job.folder, loop_request)
        self._loops.pop(str(job.folder.path), None)

    def has_loop(self, job: JobRef) -> bool:
        """Whether a loop in the cluster decides for the run; what it did since the last question is here then."""
        if not loop.is_marked(job.folder):
            return False
        key = str(job.folder.path)
        when, is_active = self._loops.get(key, (float("-inf"), True))
        if time.monotonic() - when >= ASK_SECONDS:
            api, folder, cluster_job = self._loop_of(job)
            try:
                is_active = loop.is_active(api, cluster_job)
                loop.pull(api, folder, cluster_job)
            except (RefusedError, UnreachableError):  # a server that restarts: the next look asks again
                is_active = True
            self._loops[key] = (time.monotonic(), is_active)
            if not is_active:
                loop.forget(job.folder)
        return is_active

    def _loop_of(self, job: JobRef) -> tuple[Api, RunFolder, ClusterJob]:
        api, cluster_job = self.cluster(job)
        return api, job.folder, cluster_job

    def withdraw(self, job: JobRef) -> None:
        """Delete a job that does not train, with all that belongs to it."""
        api, cluster_job = self.cluster(job)
        remove(api, cluster_job, name=job.name, grace=0.0, save_first=False)
        self._asked.pop(cluster_job.uid, None)

    def list(self) -> list[JobRef]:
        job_files = sorted(runs_root().glob(f"*/{JOB_FILE}"))
        return [JobRef("kubernetes", path.parent.name, RunFolder(path.parent)) for path in job_files]

    def elsewhere(self, place: str | None) -> Iterator[tuple[str, JobStatus]]:
        """The runs that a cluster itself knows, by name, with as much of their status as it has."""
        api = self.connect(place)
        for run_object in lookup.runs(api):
            yield run_object.name, state.bare_status(run_object.value)

    def adopt(self, name: str, place: str | None) -> JobRef:
        """A run folder here for a run of a cluster."""
        api = self.connect(place)
        job = JobRef("kubernetes", name, lookup.adopt(api, name))
        loop.adopt(api, job.folder, self._must_have(job))
        return job

    def exec(self, job: JobRef, rank: int, command: Sequence[str]) -> int:
        cluster_job, pod = self.pod_of_rank(job, rank)
        return interactively(
            self._api_of(cluster_job),
            cluster_job.namespace,
            pod.name,
            list(command),
            container=cluster_job.layout.container,
        )

    def pods(self, job: JobRef) -> Sequence[PodRow]:
        """Every pod of the job: what it does, why, and for how long."""
        cluster_job = self._must_have(job)
        if cluster_job.ended:
            return []
        seen, now = self._snapshot(job, cluster_job), time.time()
        return [row_of(pod, cluster_job.layout, now) for pod in seen.now()]

    def checkpoints(self, job: JobRef) -> Sequence[dict[str, Any]]:
        """The checkpoints in the cluster."""
        with self._reading(job) as scripts:
            return list_in_cluster(scripts, job.folder.load_run().name)

    def fetch_checkpoint(self, job: JobRef, step: int | None, to: Path) -> Checkpoint:
        """Bring one here; the newest complete one by default."""
        with self._reading(job) as scripts:
            return fetch(scripts, job.folder.load_run().name, step, to)

    def note_new_code(self, job: JobRef, run: Run) -> None:
        """The job is from now on what a submission with the present code would be: the same run attaches to it."""
        api, cluster_job = self.cluster(job)
        digest = self.render(run, self.gather(run)).digest
        api.patch(cluster_job.path, {"metadata": {"annotations": {DIGEST_ANNOTATION: digest}}})
        replace(cluster_job, digest=digest).write(job.folder)

    @contextlib.contextmanager
    def _reading(self, job: JobRef) -> Iterator[PodScripts]:
        """A pod that has the run folder: one of the job's, or one that is made for this and deleted again."""
        api, cluster_job = self.cluster(job)
        run = job.folder.load_run()
        pod = newest_by_node(job_watch.take_snapshot(api, cluster_job).now()).get(0)
        if pod is not None and pod.running and not pod.deleting:
            layout, python = cluster_job.layout, run.target.kubernetes.python
            yield PodScripts(api, cluster_job.namespace, pod.name, layout.container, python)
            return
        with reader_pod(api, run) as scripts:
            yield scripts

    @contextlib.contextmanager
    def following(self, job: JobRef) -> Iterator[None]:
        """While this is open the run folder fills with what the pods say, and the status costs no request."""
        cluster_job = self._must_have(job)
        key = str(job.folder.path)
        if key in self._following or (cluster_job.ended and recorded_end(job.folder) is not None):
            yield
            return
        self._following[key] = following.Following(self._api_of(cluster_job), cluster_job, job.folder).__enter__()
        try:
            yield
        finally:
            self._following.pop(key).__exit__()

    def facts(self, run: Run) -> ClusterFacts:
        options = run.target.kubernetes
        key = (options.context, options.namespace, options.job)
        if key not in self._facts:
            self._facts[key] = discovery.facts(self._api(run), JobKind(options.job) if options.job else None)
        return self._facts[key]

    def pod_of_rank(self, job: JobRef, rank: int) -> tuple[ClusterJob, Pod]:
        """The running pod that a rank is in."""
        cluster_job = self._must_have(job)
        layout = cluster_job.layout
        num_ranks = layout.num_pods * layout.ranks_per_pod
        if rank >= num_ranks:
            raise UserError(
                f"{job.name} has no rank {rank}",
                evidence=f"its ranks are 0 to {num_ranks - 1}",
                fix=f"rank 0 to {num_ranks - 1}; windlass show {job.name}    lists pods and ranks",
            )
        pod = newest_by_node(self._snapshot(job, cluster_job).now()).get(layout.node_of_rank(rank))
        if pod is None or not pod.running:
            why = f"{pod.phase}{f', {pod.reason}' if pod.reason else ''}" if pod else "it has none"
            raise UserError(
                f"the pod of rank {rank} of {job.name} does not run",
                evidence=f"{pod.name if pod else 'pod'}: {why}",
                fix=f"windlass show {job.name}",
            )
        return cluster_job, pod

    def running_pods(self, job: JobRef) -> tuple[Api, ClusterJob, Sequence[Pod]]:
        """The pods that commands can be run in, by node."""
        api, cluster_job = self.cluster(job)
        newest = newest_by_node(self._snapshot(job, cluster_job).now()).values()
        running = [pod for pod in newest if pod.running and not pod.deleting]
        if not running:
            raise UserError(f"{job.name} has no running pods", fix=f"windlass show {job.name}")
        return api, cluster_job, running

    def cluster(self, job: JobRef) -> tuple[Api, ClusterJob]:
        cluster_job = self._must_have(job)
        return self._api_of(cluster_job), cluster_job

    def collect(self, job: JobRef) -> dict[str, Any]:
        for _ in self.logs(job, rank=None, follow=False):
            break  # the first line comes after all of them were archived in the run folder
        return collecting.collect(*self.cluster(job))

    def collect_named(self, kind: str, name: str, place: str | None, namespace: str | None) -> dict[str, Any]:
        return collecting.collect_named(self.connect(place, namespace), kind, name)

    def connect(self, context: str | None, namespace: str | None = None) -> Api:
        if (context, namespace) not in self._apis:
            self._apis[context, namespace] = Api(access(context, namespace))
        return self._apis[context, namespace]

    def _api(self, run: Run) -> Api:
        return self.connect(run.target.kubernetes.context, run.target.kubernetes.namespace)

    def _api_of(self, job: ClusterJob) -> Api:
        return self.connect(job.context, job.namespace)

    def _served(self, run: Run, kind: JobKind) -> ServedKind:
        return self.facts(run).served.kinds.get(kind, ALWAYS)

    def _must_have(self, job: JobRef) -> ClusterJob:
        cluster_job = ClusterJob.of(job.folder)
        if cluster_job is None:
            what, fix = f"the run {job.name} was not submitted to a cluster", f"windlass show {job.name}"
            raise UserError(what, fix=fix, exit_code=ExitCode.FAILED)
        return cluster_job

    def _snapshot(self, job: JobRef, cluster_job: ClusterJob) -> job_watch.JobSnapshot:
        key = str(job.folder.path)
        live = self._following.get(key)
        if live is not None and live.job.uid != cluster_job.uid:  # a loop has submitted another
            live.__exit__()
            live = following.Following(self._api_of(cluster_job), cluster_job, job.folder).__enter__()
            self._following[key] = live
        if live is not None:
            return live.snapshot()
        when, seen = self._asked.get(cluster_job.uid, (float("-inf"), job_watch.JobSnapshot()))
        if time.monotonic() - when >= ASK_SECONDS:
            api = self._api_of(cluster_job)
            seen = job_watch.take_snapshot(api, cluster_job)
            # steps and events of the run, which node 0's pods say; one question, however many pods there are
            first = [pod for pod in seen.now() if pod.node_rank == 0 and pod.started]
            self._read(api, job, cluster_job, sorted(first, key=lambda pod: pod.created))
            self._asked[cluster_job.uid] = (time.monotonic(), seen)
        return seen

    def _recover(self, job: JobRef, cluster_job: ClusterJob, seen: job_watch.JobSnapshot) -> None:
        recovery = self._recovery.setdefault(cluster_job.uid, Recovery(self._api_of(cluster_job), cluster_job))
        for pod in recovery.tend(seen):
            job.folder.record("pod-removed", pod=pod.name, node=pod.node, why="its node does not answer")

    def _status(self, job: JobRef, cluster_job: ClusterJob, seen: job_watch.JobSnapshot) -> JobStatus:
        explainer = self._waiting.setdefault(cluster_job.uid, Waiting(self._api_of(cluster_job), cluster_job))
        num_pods = cluster_job.layout.num_pods
        stuck = self._recovery[cluster_job.uid].trouble if cluster_job.uid in self._recovery else None

        def explain() -> str:
            try:
                return stuck or explainer.explain(seen)
            except UserError as error:  # a question that is not answered now: the next one may be
                return f"why is not known: {in_words(error)}"

        return state.status_of(job.folder, seen, num_pods=num_pods, explain=explain)

    def _confirm_end(self, job: JobRef, cluster_job: ClusterJob, seen: job_watch.JobSnapshot) -> JobStatus:
        """The end of a job, once what its pods said last is here: the run's own words on it go before the cluster's.

        But not those of a run that was told to leave, where the job object says that it failed since; nor where a pod
        ran out of memory, of which its ranks know only that they were killed.
        """
        live = self._following.get(str(job.folder.path))
        if live is not None:
            live.drain()
        status = state.status_of(job.folder, seen, num_pods=cluster_job.layout.num_pods)
        recorded = recorded_end(job.folder)
        out_of_memory = status.state == "failed" and state.OUT_OF_MEMORY in (status.reason or "")
        contradicted = recorded is not None and recorded.state not in state.FOR_GOOD and status.state in state.FOR_GOOD
        if recorded is None or contradicted or out_of_memory:
            job.folder.record("exit", state=status.state, code=status.exit_code, reason=status.reason)
        replace(cluster_job, ended=True).write(job.folder)
        return recorded_end(job.folder) or status

    def _read_logs(self, job: JobRef, rank: int | None) -> None:
        """Whatever is new in the logs, of all pods or of one rank's."""
        api, cluster_job = self.cluster(job)
        pods = job_watch.take_snapshot(api, cluster_job).now()
        if rank is not None:
            pods = [pod for pod in pods if pod.node_rank in (0, cluster_job.layout.node_of_rank(rank))]
        self._read(api, job, cluster_job, [pod for pod in pods if pod.started])

    def _read(self, api: Api, job: JobRef, cluster_job: ClusterJob, pods: Sequence[Pod]) -> None:
        fill = filler(api, cluster_job, job.folder, lambda: pods)
        with archive.opened(job.folder, fill) as kept:
            if kept is None:  # another process follows the run, and writes all this down
                return
            try:
                logs.read_once(logs.LogReader(api, cluster_job, kept), pods)
            except RefusedError as error:
                if error.code < 500:  # a kubelet that does not answer; its pod's log is read when it does
                    raise

    def _read_last_logs(self, api: Api, folder: RunFolder) -> None:
        earlier = ClusterJob.of(folder)
        if earlier is not None:
            pods = job_watch.take_snapshot(api, earlier).now()
            self._read(api, JobRef("kubernetes", folder.name, folder), earlier, pods)
