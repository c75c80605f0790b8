"""Hand a request to a cluster: once, whole or not at all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import yaml

from windlass.errors import ExitCode, UserError
from windlass.spec import Run
from windlass.spec.compatibility import leaves
from windlass.targets.kubernetes.api.errors import RefusedError, UnreachableError, if_allowed
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.checks import explain, misses, path_of
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path
from windlass.targets.kubernetes.manifests.cluster_facts import ServedKind
from windlass.targets.kubernetes.manifests.labels import (
    DIGEST_ANNOTATION,
    MANAGED_BY,
    NAME_ANNOTATION,
    SUBMISSION_LABEL,
    safe_name,
)
from windlass.targets.kubernetes.manifests.request import KubernetesRequest, Manifest
from windlass.targets.kubernetes.watch.state import end_of

GONE_SECONDS = 300.0  # for the pods of an earlier job to leave
SEEN_SECONDS = 20.0  # for what was created to be seen by operators
POLL_SECONDS = 0.5
MOST_LINES = 8
RUN_KEY = "run.yaml"
SETTLED = ("gpus_per_node", "processes_per_node", "threads_per_process")  # by the nodes, where a run file is silent


def job_of(request: KubernetesRequest, served: ServedKind, api: Api, value: Object) -> ClusterJob:
    """The job file of an object that is in the cluster."""
    labels = value["metadata"].get("labels") or {}
    submission = labels.get(SUBMISSION_LABEL, request.submission)
    return ClusterJob.of_object(api.access, request.kind, served, value, request.pods, submission=submission)


def under_way(api: Api, request: KubernetesRequest, served: ServedKind) -> ClusterJob | None:
    """The job of this very request that is in the cluster and has not ended; another one of its name is an error."""
    path = object_path(served.api_version, served.plural, request.namespace, request.object_name)
    value = api.find(path)
    if value is None:
        must_not_be_of_another_kind(api, request, served)
    if value is None or end_of(value) is not None or value["metadata"].get("deletionTimestamp"):
        return None
    metadata = value["metadata"]
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    where = f"{value.get('kind', served.kind)} {request.object_name} in the namespace {request.namespace}"
    if not MANAGED_BY.items() <= labels.items():
        raise UserError(
            f"the name {request.object_name} is taken by a job that windlass did not make",
            evidence=where,
            fix="name=OTHER",
        )
    if annotations.get(DIGEST_ANNOTATION) != request.digest:
        name = annotations.get(NAME_ANNOTATION, request.name)
        raise UserError(
            f"the run {name} is in the cluster with other settings, and has not ended",
            evidence="\n".join([where, *differences(api, request)]),
            cause="a job that is under way cannot change; only its code can (windlass sync)",
            fix=f"windlass logs {request.name} --follow    follows the one that is there\n"
            f"windlass stop {request.name}    and then this again\n"
            "name=OTHER    trains it beside",
        )
    return job_of(request, served, api, value)


def as_under_way(api: Api, run: Run, served: ServedKind) -> Run:
    """The run with the ranks and threads of its job that is under way, where it does not say them itself: nodes that
    come and go meanwhile do not make it another run."""
    requested = run.resources
    open_keys = [key for key in SETTLED if getattr(requested, key) is None]
    if not open_keys:
        return run
    name, namespace = safe_name(run.name), api.access.namespace
    job = if_allowed(api.find, object_path(served.api_version, served.plural, namespace, name))
    if job is None or end_of(job) is not None or job["metadata"].get("deletionTimestamp"):
        return run
    value = if_allowed(api.find, object_path("v1", "configmaps", namespace, f"{name}-run"))
    resources = (yaml.safe_load(((value or {}).get("data") or {}).get(RUN_KEY) or "{}").get("resources")) or {}
    if resources.get("instance") != requested.instance or resources.get("nodes") != requested.nodes:
        return run
    update = {key: resources[key] for key in open_keys if resources.get(key) is not None}
    return run.model_copy(update={"resources": requested.model_copy(update=update)})


def must_not_be_of_another_kind(api: Api, request: KubernetesRequest, served: ServedKind) -> None:
    """What goes with a run bears the run's name whatever kind its job is: two kinds at once would share it."""
    value = api.find(object_path("v1", "configmaps", request.namespace, f"{request.object_name}-run"))
    for owner in ((value or {}).get("metadata") or {}).get("ownerReferences") or ():
        if owner.get("kind") not in (None, served.kind):
            raise UserError(
                f"the run {request.name} is in the cluster as a {owner['kind']}",
                evidence=f"{owner['kind']} {owner.get('name')} in the namespace {request.namespace}",
                fix=f"windlass stop {request.name}    and then this again; or name=OTHER",
            )


def differences(api: Api, request: KubernetesRequest) -> list[str]:
    """In which keys of the run file the job that is there differs from what is asked."""
    mine = next((dependent for dependent in request.dependents if RUN_KEY in (dependent.get("data") or {})), None)
    if mine is None:
        return []
    theirs = api.find(object_path("v1", "configmaps", request.namespace, mine["metadata"]["name"]))
    submitted = dict(leaves(yaml.safe_load(((theirs or {}).get("data") or {}).get(RUN_KEY) or "{}")))
    requested = dict(leaves(yaml.safe_load(mine["data"][RUN_KEY])))
    changed = [key for key in sorted(submitted.keys() | requested.keys()) if submitted.get(key) != requested.get(key)]
    if not changed:
        return ["the run file is the same; the code that goes with it, the kind of job or an injected fault is not"]
    lines = [f"{key}: {submitted.get(key)!r} there, {requested.get(key)!r} asked" for key in changed]
    return lines[:MOST_LINES] + ([f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else [])


def submit(
    api: Api, request: KubernetesRequest, served: ServedKind, before_replacing: Callable[[], None]
) -> tuple[ClusterJob, Callable[[], None]]:
    """The job of the request: the one that is under way, or a new one; and what takes back what was created here."""
    running = under_way(api, request, served)
    if running is not None:
        adopt_dependents(api, request, served, running)
        return running, lambda: None
    path = path_of(request.job, request, served)
    old = api.find(f"{path}/{request.object_name}")
    if old is not None:
        before_replacing()
        clear(api, request, served)
    made: list[str] = []  # the places of what was created, in that order

    def take_back() -> None:
        for place in reversed(made):
            with contextlib.suppress(UserError):  # the first error is the one to show
                api.delete(place)

    try:
        for manifest in request.objects:
            made.append(f"{path_of(manifest, request, served)}/{manifest['metadata']['name']}")
            try:
                created = _create(api, request, served, manifest)
            except UnreachableError:
                raise  # it may have been created all the same
            except UserError:
                made.pop()
                raise
        own(api, created, made[:-1])
    except BaseException:
        take_back()
        raise
    return job_of(request, served, api, created), take_back


def adopt_dependents(api: Api, request: KubernetesRequest, served: ServedKind, job: ClusterJob) -> None:
    """What goes with a job that is under way belongs to it: whoever submitted it may have been killed before that."""
    places = []
    for manifest in request.dependents:
        place = f"{path_of(manifest, request, served)}/{manifest['metadata']['name']}"
        value = if_allowed(api.find, place)  # secrets are not for everybody to read
        if value is not None and not value["metadata"].get("ownerReferences"):
            places.append(place)
    if places:
        metadata = {"name": job.object_name, "uid": job.uid}
        own(api, {"apiVersion": job.api_version, "kind": request.job["kind"], "metadata": metadata}, places)


def own(api: Api, job: Object, places: Sequence[str]) -> None:
    """Make the job the owner of what goes with it: deleting it then deletes everything.

    It does not wait for them when it is deleted in the foreground: a TrainingRuntime stays until its TrainJob is gone.
    """
    reference = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }
    for place in places:
        api.patch(place, {"metadata": {"ownerReferences": [reference]}})


def clear(api: Api, request: KubernetesRequest, served: ServedKind) -> None:
    """Remove an ended job of the same name, and wait until it is gone."""
    paths = [f"{path_of(value, request, served)}/{value['metadata']['name']}" for value in request.objects]
    api.delete(paths[-1])
    for path in paths[:-1]:
        api.delete(path)
    deadline = time.monotonic() + GONE_SECONDS
    pods = object_path("v1", "pods", request.namespace)
    while any(api.find(path) is not None for path in paths) or any(
        api.items(pods, labelSelector=request.pods.selector)
    ):
        if time.monotonic() > deadline:
            raise UserError(
                f"the earlier job {request.object_name} does not leave the cluster",
                evidence=f"it was deleted {GONE_SECONDS:.0f} s ago and is still there",
                fix=f"windlass stop {request.name} --now",
                exit_code=ExitCode.FAILED,
            )
        time.sleep(POLL_SECONDS)


def _create(api: Api, request: KubernetesRequest, served: ServedKind, manifest: Manifest) -> Object:
    path = path_of(manifest, request, served)
    seen_by = time.monotonic() + SEEN_SECONDS
    try:
        while True:
            try:
                return api.create(path, request.with_secret_values(manifest))
            except RefusedError as error:
                # an operator's webhook answers from a cache, which what was created just before may not have reached
                missing = any(misses(error, dependent) for dependent in request.dependents)
                if not missing or time.monotonic() > seen_by:
                    raise
            time.sleep(POLL_SECONDS)
    except RefusedError as error:
        if error.code != 409 or error.reason != "AlreadyExists" or manifest is request.job:
            raise (explain(api, error, manifest, request) or error) from None
    # left by a submission that was killed before its job was there, or of an earlier job that is just being cleared
    place = f"{path}/{manifest['metadata']['name']}"
    value = api.find(place)
    labels = ((value or {}).get("metadata") or {}).get("labels") or {}
    if value is not None and not MANAGED_BY.items() <= labels.items():
        raise UserError(
            f"the name {manifest['metadata']['name']} is taken by a {manifest['kind']} that windlass did not make",
            fix="name=OTHER",
        )
    deadline = time.monotonic() + GONE_SECONDS
    while api.find(place) is not None and time.monotonic() < deadline:
        api.delete(place)
        time.sleep(POLL_SECONDS)
    return api.create(path, request.with_secret_values(manifest))
