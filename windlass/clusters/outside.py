"""What a run fetches from outside the cluster: its image from a registry, its model and data from a hub."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

from windlass.clusters.result import Result, failed, named, passed, skipped, warning
from windlass.clusters.snapshot import Refusal, Snapshot
from windlass.common.hub import check_access, has_token
from windlass.data.checks import check_hub, repositories
from windlass.errors import ExitCode, UserError
from windlass.image.aws.ecr import EcrHost, push_token
from windlass.image.registry.credentials import Credentials, find_credentials
from windlass.image.registry.reference import HUB, ImageReference
from windlass.image.registry.registry import Repository
from windlass.spec import Run
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import object_path

TOKEN = "HF_TOKEN"
DOCKER_CONFIG = ".dockerconfigjson"


def check_outside(api: Api, snapshot: Snapshot, run: Run) -> list[Result]:
    """Asked from here: nodes may stand elsewhere in the network, so what does not answer is skipped and said."""
    return [*named("image", _image(api, snapshot, run)), *named("hub", _hub(run))]


def _image(api: Api, snapshot: Snapshot, run: Run) -> Iterator[Result]:
    name = run.target.kubernetes.image or run.image.name
    if not name:
        return
    try:
        image = ImageReference.parse(name)
        if image.registry is None:
            return  # the nodes themselves must have it
        credentials, secret = _credentials(api, snapshot, run, image.registry)
    except UserError as error:
        yield _unknown(name, error)
        return
    whose = f"with the pull secret {secret}" if secret else "with what this machine knows"
    try:
        manifest = Repository(image, credentials).manifest(image.pointer)
    except UserError as error:
        if error.exit_code == ExitCode.FAILED:  # it does not answer, or is not well
            yield _unknown(name, error)
        else:  # nodes often have credentials of their own
            yield (failed if secret else warning)(
                f"{error.what}, asked {whose}",
                error.evidence or error.cause,
                fix="target.kubernetes.image_pull_secrets=[NAME], unless the nodes have credentials of their own",
            )
        return
    if manifest is None:
        yield failed(
            f"there is no image {name}",
            evidence=f"{image.registry} answers 404, asked {whose}",
            fix="windlass image push RUN_FILE    or image.name=OTHER",
        )
    else:
        yield passed(f"{image.registry} gives {image.repository}, asked {whose}")


def _unknown(name: str, error: UserError) -> Result:
    why = f"{error.what}: {error.evidence}"
    return skipped(f"whether nodes can pull {name} was not found out", why)


def _credentials(api: Api, snapshot: Snapshot, run: Run, registry: str) -> tuple[Credentials | None, str | None]:
    """Those of the secret that pods pull with, and its name, where it may be read; else this machine's."""
    for name in _pull_secrets(snapshot, run):
        try:
            secret = api.find(object_path("v1", "secrets", snapshot.namespace, name))
        except UserError:
            continue  # not everybody may read what pods may use
        credentials = _from_secret(secret or {}, registry)
        if credentials:
            return credentials, name
    host = EcrHost.of(registry)
    return (push_token(host) if host else find_credentials(registry)), None


def _pull_secrets(snapshot: Snapshot, run: Run) -> list[str]:
    """The run's own, and those of its service account."""
    account = run.target.kubernetes.service_account or "default"
    accounts = () if isinstance(snapshot.service_accounts, Refusal) else snapshot.service_accounts
    named = [value.get("imagePullSecrets") or () for value in accounts if value["metadata"]["name"] == account]
    return [*run.target.kubernetes.image_pull_secrets, *(entry["name"] for entries in named for entry in entries)]


def _from_secret(secret: Object, registry: str) -> Credentials | None:
    try:
        auths = json.loads(base64.b64decode((secret.get("data") or {})[DOCKER_CONFIG]))["auths"]
        hosts = {registry, "index.docker.io"} if registry == HUB else {registry}  # as kubectl and docker call it
        entry = next(value for key, value in auths.items() if key.split("://")[-1].split("/")[0] in hosts)
        if "auth" not in entry:
            return Credentials(entry["username"], entry["password"])
        return Credentials.from_basic(entry["auth"])
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
        return None


def _hub(run: Run) -> Iterator[Result]:
    names = sorted({repository.name for repository in repositories(run)})
    if not names:
        return
    try:
        unknown = check_hub(run)
    except UserError as error:
        yield failed(error.what, error.evidence or error.cause, error.fix)
        return
    if unknown:
        yield skipped("the hub was not asked from here", "; ".join(unknown))
        return
    kubernetes = run.target.kubernetes
    pods_have_token = TOKEN in kubernetes.environment or any(
        secret.partition("=")[0] == TOKEN for secret in kubernetes.secrets
    )
    refused = None if pods_have_token or not has_token() else _without_token(run)
    if refused:
        fix = f"target.kubernetes.secrets=['{TOKEN}']"
        yield failed(f"{TOKEN} does not go to the pods, and without it: {refused.what}", refused.evidence, fix)
    else:
        yield passed(f"the hub gives {', '.join(names)}")


def _without_token(run: Run) -> UserError | None:
    """What the hub says to pods that send no token."""
    for repository in repositories(run):
        try:
            check_access(repository.name, what=repository.what, kind=repository.kind, anonymously=True)
        except UserError as error:
            return error
    return None
