"""What a cluster would refuse, or never start, said before anything is created."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from functools import partial

from windlass.common.quantities import parse_quantity, show_quantity
from windlass.errors import UserError
from windlass.spec import Run
from windlass.targets.kubernetes.api.discovery import kueue_version, no_namespace
from windlass.targets.kubernetes.api.errors import RefusedError, if_allowed
from windlass.targets.kubernetes.api.http import NO_WEBHOOK, Api, Object
from windlass.targets.kubernetes.jobfile import object_path, plural_of
from windlass.targets.kubernetes.manifests.capacity import requests
from windlass.targets.kubernetes.manifests.cluster_facts import ServedKind
from windlass.targets.kubernetes.manifests.request import KubernetesRequest, Manifest

NO_DRY_RUN = "does not support dry run"
TOO_LARGE = ("1048576 bytes", "request is too large", "Request entity too large", "trying to send message larger")


def check(api: Api, run: Run, request: KubernetesRequest, served: ServedKind, *, bytes_needed: int | None) -> list[str]:
    """Raise the first thing that cannot work; return what will work, but badly."""
    warnings = list(request.warnings)
    warnings += claim_is_there(api, run, request.namespace, bytes_needed)
    for what, path, key in _named(run, request.namespace):
        must_be_there(api, what, path, key)
    if run.target.kubernetes.queue:
        queue_is_there(api, run.target.kubernetes.queue, request.namespace)
    # the API server checks every object as if it were created: fields, names, permissions, quotas, webhooks
    for manifest in request.objects:
        _try(api, path_of(manifest, request, served), manifest, request)
    pods_would_be_accepted(api, request)
    return warnings + quotas_have_room(api, request)


def claim_is_there(api: Api, run: Run, namespace: str, bytes_needed: int | None) -> list[str]:
    kind, _, place = run.target.kubernetes.storage.partition(":")
    if kind != "pvc":
        return []
    name = place.partition("/")[0]
    claims = object_path("v1", "persistentvolumeclaims", namespace)
    try:
        claim = api.find(f"{claims}/{name}")
    except RefusedError as error:
        if error.code == 403:
            return [f"whether the claim {name} is there cannot be checked: you may not read claims in {namespace}"]
        raise
    if claim is None:
        names = [part["metadata"]["name"] for part in api.items(claims)]
        near = difflib.get_close_matches(name, names, 1) or names[:1]
        new = f"kubectl -n {namespace} apply -f CLAIM.yaml"
        raise UserError(
            f"there is no claim {name!r} in the namespace {namespace}",
            evidence=f"claims there: {', '.join(names) or 'none'}",
            fix=f"target.kubernetes.storage=pvc:{near[0]}    or {new}" if near else new,
        )
    return [*_access(claim, name, run), *_room(claim, name, bytes_needed)]


def _access(claim: Object, name: str, run: Run) -> Iterator[str]:
    modes = (claim.get("spec") or {}).get("accessModes") or []
    if (claim.get("status") or {}).get("phase") == "Lost":
        raise UserError(f"the volume of the claim {name} is lost", fix="target.kubernetes.storage=pvc:OTHER")
    if run.resources.nodes > 1 and "ReadWriteMany" not in modes:
        raise UserError(
            f"the claim {name} cannot be used by {run.resources.nodes} nodes at once",
            evidence=f"its access modes: {', '.join(modes)}",
            cause="every pod writes its share of a checkpoint there",
            fix="target.kubernetes.storage=pvc:CLAIM    with ReadWriteMany: FSx for Lustre, EFS",
        )
    if (claim.get("status") or {}).get("phase") == "Pending":
        yield f"the claim {name} has no volume yet; some classes make one only when a first pod asks for it"


def _room(claim: Object, name: str, bytes_needed: int | None) -> Iterator[str]:
    capacity = ((claim.get("status") or {}).get("capacity") or {}).get("storage")
    if bytes_needed and capacity and parse_quantity(capacity) < bytes_needed:
        needed = f"{show_quantity('memory', float(bytes_needed))} for the checkpoints it keeps"
        size = show_quantity("memory", parse_quantity(capacity))
        yield f"the claim {name} has {size}, and the run needs {needed} (checkpoint.keep)"


def _named(run: Run, namespace: str) -> Iterator[tuple[str, str, str | None]]:
    """Objects that the run file names, and that must be there before the pods."""
    options = run.target.kubernetes
    if options.service_account:
        path = object_path("v1", "serviceaccounts", namespace, options.service_account)
        yield f"service account {options.service_account}", path, None
    for name in options.image_pull_secrets:
        yield f"secret {name}", object_path("v1", "secrets", namespace, name), None
    for secret in options.secrets:
        source = secret.partition("=")[2]
        if source.startswith("secret:"):
            name, _, key = source.removeprefix("secret:").partition("/")
            yield f"secret {name}", object_path("v1", "secrets", namespace, name), key
    if options.priority_class:
        path = object_path("scheduling.k8s.io/v1", "priorityclasses", None, options.priority_class)
        yield f"priority class {options.priority_class}", path, None


def queue_is_there(api: Api, queue: str, namespace: str) -> None:
    version = kueue_version(api)
    if version is None:
        raise UserError(
            f"the cluster has no Kueue, and target.kubernetes.queue is {queue}",
            evidence="kueue.x-k8s.io is not served",
            fix="leave target.kubernetes.queue out",
        )
    must_be_there(api, f"Kueue queue {queue}", object_path(version, "localqueues", namespace, queue), None)


def must_be_there(api: Api, what: str, path: str, key: str | None) -> None:
    try:
        secret_object = api.find(path)
    except RefusedError as error:
        if error.code == 403:  # not everybody may read what pods may use
            return
        raise
    namespace = path.partition("/namespaces/")[2].partition("/")[0]
    where = f" in the namespace {namespace}" if namespace else ""
    if secret_object is None:
        raise UserError(f"there is no {what}{where}", fix=f"kubectl get {path.split('/')[-2]}{_n(namespace)}")
    if key is not None and key not in (secret_object.get("data") or {}):
        raise UserError(
            f"the {what} has no key {key!r}",
            evidence=f"its keys: {', '.join(secret_object.get('data') or {}) or 'none'}",
            fix=f"kubectl describe secret {path.split('/')[-1]}{_n(namespace)}",
        )


def pods_would_be_accepted(api: Api, request: KubernetesRequest) -> None:
    """The same for one of the job's pods: quotas, PodSecurity, limit ranges and webhooks look at pods alone, and what
    they refuse is otherwise said only in an event of whoever makes them."""
    _try(api, object_path("v1", "pods", request.namespace), request.example_pod, request)


def _try(api: Api, path: str, manifest: Manifest, request: KubernetesRequest) -> None:
    try:
        api.create(path, request.with_secret_values(manifest), dry_run=True)
    except RefusedError as error:
        if manifest["kind"] == "Pod" and error.code == 403 and error.verb:
            return  # whoever may make jobs need not be allowed to make pods
        raised = explain(api, error, manifest, request)
        if raised is not None:
            raise raised from None


def quotas_have_room(api: Api, request: KubernetesRequest) -> list[str]:
    """A warning where one pod would be admitted, but not all of them at once."""
    quotas = if_allowed(lambda: list(api.items(object_path("v1", "resourcequotas", request.namespace))))
    amounts, num_pods, notes = requests(request.example_pod), request.pods.num_pods, []
    for quota in quotas or ():
        if (quota.get("spec") or {}).get("scopes") or (quota.get("spec") or {}).get("scopeSelector"):
            continue  # it may not be about these pods
        hard, used = ((quota.get("status") or {}).get(key) or {} for key in ("hard", "used"))
        for name, limit in hard.items():
            resource = name.removeprefix("requests.")
            free = parse_quantity(limit) - parse_quantity(used.get(name, "0"))
            if resource in amounts and amounts[resource] * num_pods > free + 1e-9:
                each = f"{num_pods} pods ask for {show_quantity(resource, amounts[resource])} each"
                total = show_quantity(resource, parse_quantity(limit))
                left = f"{show_quantity(resource, max(0.0, free))} of {total} is left"
                notes.append(f"the quota {quota['metadata']['name']}: {resource}: {each}, {left}; the others will wait")
    return notes


def explain(api: Api, error: RefusedError, manifest: Manifest, request: KubernetesRequest) -> UserError | None:
    """A refusal to create an object, for a person; None for one that is no obstacle."""
    what = f"{manifest['kind']} {manifest['metadata']['name']}"
    refused = partial(UserError, evidence=error.message)
    if error.code == 409 and error.reason == "AlreadyExists":
        return None  # of an earlier submission: what becomes of it is decided when the run is submitted
    if error.code == 403 and any(misses(error, dependent) for dependent in request.dependents):
        return None  # a webhook looks for what is created just before; fields were checked when it is asked
    if NO_DRY_RUN in error.message:
        return None  # a webhook that cannot be asked without consequences is asked when it is real
    if error.code == 404 and "namespaces" in error.message:
        return no_namespace(api, request.namespace)
    if error.code == 404:
        return refused(
            f"the cluster does not know {manifest['kind']} of {manifest['apiVersion']}",
            fix="leave target.kubernetes.job out, and windlass takes what is there",
        )
    if error.code == 413 or any(text in error.message for text in TOO_LARGE):
        return _too_large(error, manifest, what)
    if error.code == 422 and manifest["kind"] == "Pod" and "must be less than or equal to" in error.message:
        return _limit_range(error, what, request.namespace)  # whose default limit is below what is asked
    if error.code in (400, 422):
        return refused(
            f"the cluster does not accept the {what}",
            cause="target.kubernetes.pod may say something that a pod spec does not have",
            fix="--dry-run    shows what it was asked",
        )
    if NO_WEBHOOK in error.message:
        return refused(
            f"the cluster cannot check the {what}: a webhook of its does not answer",
            cause="the operator that it belongs to is down, or just starting",
            fix="kubectl get pods -A    shows it; then the same again, or target.kubernetes.job=job",
        )
    if error.code == 403 and error.verb and manifest["kind"] == "TrainingRuntime":
        return refused(
            f"you may not {error.verb} a TrainingRuntime in the namespace {request.namespace}",
            cause="a trainjob brings a runtime of its own, unless it names one",
            fix=f"target.kubernetes.runtime=NAME    uses one that is there (kubectl get clustertrainingruntimes)\n"
            f"target.kubernetes.job=job    needs none\n{error.fix}",
        )
    if error.code == 403 and not error.verb:
        return _not_admitted(error, what, request.namespace)
    return error


def _not_admitted(error: RefusedError, what: str, namespace: str) -> UserError:
    """What an admission controller refuses: no other role would change it."""
    refused = partial(UserError, evidence=error.message)
    quota = f"the quota of the namespace {namespace}"
    if "exceeded quota" in error.message:
        return refused(f"{quota} does not allow the {what}", fix=f"kubectl -n {namespace} describe quota")
    if "failed quota" in error.message:  # it must specify cpu, memory, …
        fix = "target.kubernetes.cpu=8 target.kubernetes.memory=64Gi"
        return refused(f"{quota} wants the {what} to say how much it needs", fix=fix)
    if "PodSecurity" in error.message:
        return refused(
            f"the namespace {namespace} does not allow the {what}",
            cause="its label pod-security.kubernetes.io/enforce",
            fix="target.kubernetes.pod={securityContext: …}    (docs/kubernetes.md, PodSecurity), or another namespace",
        )
    if "per Container" in error.message or "per Pod" in error.message:
        return _limit_range(error, what, namespace)
    return error


def _limit_range(error: RefusedError, what: str, namespace: str) -> UserError:
    return UserError(
        f"a limit range of the namespace {namespace} does not allow the {what}",
        evidence=error.message,
        fix=f"kubectl -n {namespace} describe limitrange    and target.kubernetes.cpu, target.kubernetes.memory",
    )


def _too_large(error: RefusedError, manifest: Manifest, what: str) -> UserError:
    size = len(json.dumps(manifest)) / 2**10
    return UserError(
        f"the {what} is too large for the cluster: {size:,.0f} KiB",
        evidence=error.message[:300],
        cause="an object of a cluster holds about 1 MiB, and the run file goes into one: target.kubernetes.pod, "
        "environment or data.mixture in it is that long",
        fix="a ConfigMap or a file on the claim for what is long, and its name in target.kubernetes.pod",
    )


def misses(error: RefusedError, manifest: Manifest) -> bool:
    """Whether a webhook complains that this object is not there."""
    name, kind, message = manifest["metadata"]["name"], manifest["kind"], error.message
    missing = kind in message and f'"{name}" not found' in message
    missing |= kind == "TrainingRuntime" and f"runtime '{name}' not found" in message  # Kueue's words
    return "admission webhook" in message and missing


def path_of(manifest: Manifest, request: KubernetesRequest, served: ServedKind) -> str:
    """Where objects of a manifest's kind are created."""
    plural = served.plural if manifest["kind"] == served.kind else plural_of(manifest["kind"])
    return object_path(manifest["apiVersion"], plural, request.namespace)


def _n(namespace: str) -> str:
    return f" -n {namespace}" if namespace else ""
