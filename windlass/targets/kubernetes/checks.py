"""What a cluster would refuse, or never start, said before anything is created."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from windlass.errors import UserError
from windlass.spec import Run
from windlass.targets.kubernetes.api import NO_WEBHOOK, Api, Object
from windlass.targets.kubernetes.discovery import no_namespace
from windlass.targets.kubernetes.facts import ServedKind
from windlass.targets.kubernetes.jobfile import object_path, plural_of
from windlass.targets.kubernetes.quantities import parse, show
from windlass.targets.kubernetes.refusals import RefusedError
from windlass.targets.kubernetes.request import KubernetesRequest, Manifest


def check(api: Api, run: Run, request: KubernetesRequest, served: ServedKind, *, bytes_needed: int | None) -> list[str]:
    """Raise the first thing that cannot work; return what will work, but badly."""
    warnings = list(request.warnings)
    warnings += claim_is_there(api, run, request.namespace, bytes_needed)
    for what, path, key in _named(run, request.namespace):
        must_be_there(api, what, path, key)
    would_be_accepted(api, request, served)
    return warnings


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
        there = [one["metadata"]["name"] for one in api.items(claims)]
        near = difflib.get_close_matches(name, there, 1) or there[:1]
        new = f"kubectl -n {namespace} apply -f CLAIM.yaml"
        raise UserError(
            f"there is no claim {name!r} in the namespace {namespace}",
            evidence=f"claims there: {', '.join(there) or 'none'}",
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
    if bytes_needed and capacity and parse(capacity) < bytes_needed:
        asked = f"{show('memory', float(bytes_needed))} for the checkpoints it keeps"
        yield f"the claim {name} has {show('memory', parse(capacity))}, and the run needs {asked} (checkpoint.keep)"


def _named(run: Run, namespace: str) -> Iterator[tuple[str, str, str | None]]:
    """Objects that the run file names, and that must be there before the pods."""
    asked = run.target.kubernetes
    if asked.service_account:
        path = object_path("v1", "serviceaccounts", namespace, asked.service_account)
        yield f"service account {asked.service_account}", path, None
    for name in asked.image_pull_secrets:
        yield f"secret {name}", object_path("v1", "secrets", namespace, name), None
    for one in asked.secrets:
        source = one.partition("=")[2]
        if source.startswith("secret:"):
            name, _, key = source.removeprefix("secret:").partition("/")
            yield f"secret {name}", object_path("v1", "secrets", namespace, name), key
    if asked.priority_class:
        path = object_path("scheduling.k8s.io/v1", "priorityclasses", None, asked.priority_class)
        yield f"priority class {asked.priority_class}", path, None
    if asked.queue:
        path = object_path("kueue.x-k8s.io/v1beta1", "localqueues", namespace, asked.queue)
        yield f"Kueue queue {asked.queue}", path, None


def must_be_there(api: Api, what: str, path: str, key: str | None) -> None:
    try:
        found = api.find(path)
    except RefusedError as error:
        if error.code == 403:  # not everybody may read what pods may use
            return
        raise
    namespace = path.partition("/namespaces/")[2].partition("/")[0]
    where = f" in the namespace {namespace}" if namespace else ""
    if found is None:
        raise UserError(f"there is no {what}{where}", fix=f"kubectl get {path.split('/')[-2]}{_n(namespace)}")
    if key is not None and key not in (found.get("data") or {}):
        raise UserError(
            f"the {what} has no key {key!r}",
            evidence=f"its keys: {', '.join(found.get('data') or {}) or 'none'}",
            fix=f"kubectl describe secret {path.split('/')[-1]}{_n(namespace)}",
        )


def would_be_accepted(api: Api, request: KubernetesRequest, served: ServedKind) -> None:
    """Ask the API server to check every object as if it were created: fields, names, permissions, quotas, webhooks."""
    for manifest in request.objects:
        path = path_of(manifest, request, served)
        try:
            api.create(path, request.with_secret_values(manifest), dry_run=True)
        except RefusedError as error:
            raised = explain(api, error, manifest, request)
            if raised is not None:
                raise raised from None


def explain(api: Api, error: RefusedError, manifest: Manifest, request: KubernetesRequest) -> UserError | None:
    """A refusal to create an object, for a person; None for one that is no obstacle."""
    what = f"{manifest['kind']} {manifest['metadata']['name']}"
    if error.code == 409 and error.reason == "AlreadyExists":
        return None  # of an earlier submission: what becomes of it is decided when the run is submitted
    if error.code == 403 and any(_misses(error, one) for one in request.dependents):
        return None  # a webhook looks for what is created just before; fields were checked when it is asked
    if error.code == 404 and "namespaces" in error.message:
        return no_namespace(api, request.namespace)
    if error.code == 404:
        return UserError(
            f"the cluster does not know {manifest['kind']} of {manifest['apiVersion']}",
            evidence=error.message,
            fix="leave target.kubernetes.job out, and windlass takes what is there",
        )
    if error.code in (400, 422):
        return UserError(
            f"the cluster does not accept the {what}",
            evidence=error.message,
            cause="target.kubernetes.pod may say something that a pod spec does not have",
            fix="--dry-run    shows what it was asked",
        )
    if NO_WEBHOOK in error.message:
        return UserError(
            f"the cluster cannot check the {what}: a webhook of its does not answer",
            evidence=error.message,
            cause="the operator that it belongs to is down, or just starting",
            fix="kubectl get pods -A    shows it; then the same again, or target.kubernetes.job=job",
        )
    if error.code == 403 and "exceeded quota" in error.message:
        return UserError(
            f"the quota of the namespace {request.namespace} does not allow the {what}",
            evidence=error.message,
            fix=f"kubectl -n {request.namespace} describe quota",
        )
    return error


def _misses(error: RefusedError, manifest: Manifest) -> bool:
    """Whether a webhook complains that this object is not there."""
    name, kind = manifest["metadata"]["name"], manifest["kind"]
    return "admission webhook" in error.message and kind in error.message and f'"{name}" not found' in error.message


def path_of(manifest: Manifest, request: KubernetesRequest, served: ServedKind) -> str:
    """Where objects of a manifest's kind are created."""
    plural = served.plural if manifest["kind"] == served.kind else plural_of(manifest["kind"])
    return object_path(manifest["apiVersion"], plural, request.namespace)


def _n(namespace: str) -> str:
    return f" -n {namespace}" if namespace else ""
