"""Entries of a kubeconfig: contexts listed, one for an EKS cluster written, the others left as they are."""

from __future__ import annotations

import base64
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from windlass.clusters.listing import EksCluster, Listed
from windlass.common import aws
from windlass.common.files import write_atomically
from windlass.common.locks import locked
from windlass.errors import UserError
from windlass.targets.kubernetes.api.kubeconfig import KUBECONFIG, kubeconfig_files, read, read_all

TOKEN_PREFIX = "k8s-aws-v1."
TOKEN_SECONDS = 14 * 60  # AWS takes the signature for 15 minutes
CLUSTER_HEADER = "x-k8s-aws-id"
EXEC_API = "client.authentication.k8s.io/v1beta1"


def contexts() -> Iterator[Listed]:
    """Every context that kubectl would know, the current one marked."""
    config = read_all(kubeconfig_files())
    for name, entry in config.contexts.items():
        cluster = config.clusters.get(str(entry.value.get("cluster") or ""))
        server = str((cluster and cluster.value.get("server")) or "no server")
        yield Listed("context", name, None, server, context=name, is_current=name == config.current)


def use(cluster: EksCluster, *, alias: str | None, namespace: str | None) -> tuple[Path, str]:
    """Make a cluster the current context, in the file that kubectl would write to; the file and the context's name."""
    named = [Path(part) for part in os.environ.get(KUBECONFIG, "").split(os.pathsep) if part]
    path = next(iter(kubeconfig_files()), named[-1] if named else Path.home() / ".kube" / "config").resolve()
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file that a context could be written to", fix=f"unset {KUBECONFIG}")
    context = alias or cluster.arn
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot be made for a kubeconfig", evidence=str(error.strerror), fix=f"{KUBECONFIG}=FILE"
        ) from None
    with locked(path.with_name(f".{path.name}.windlass-lock")):  # kubectl's own lock is a file that must not exist
        values = read(path) if path.is_file() else {"apiVersion": "v1", "kind": "Config"}
        about = {"server": cluster.endpoint, "certificate-authority-data": cluster.certificate}
        _put(values, "clusters", {"name": cluster.arn, "cluster": about})
        _put(values, "users", {"name": cluster.arn, "user": {"exec": _credentials_command(cluster)}})
        about = {"cluster": cluster.arn, "user": cluster.arn, **({"namespace": namespace} if namespace else {})}
        _put(values, "contexts", {"name": context, "context": about})
        values["current-context"] = context
        write_atomically(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True), mode=0o600)
    return path, context


def token(name: str, region: str | None) -> str:
    """A token for an EKS cluster: a signed question to STS, which the cluster asks to learn who it was."""
    client = aws.client("sts", region)
    with aws.asking(f"signing in to the cluster {name}"):
        client.meta.events.register(
            "before-sign.sts.GetCallerIdentity", lambda request, **_: request.headers.add_header(CLUSTER_HEADER, name)
        )
        url = client.generate_presigned_url("get_caller_identity", ExpiresIn=60, HttpMethod="GET")
    return TOKEN_PREFIX + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


def _credentials_command(cluster: EksCluster) -> dict[str, Any]:
    """windlass itself signs in, so that no aws CLI is needed."""
    profile = os.environ.get("AWS_PROFILE")
    beside = str(Path(sys.executable).with_name("windlass"))  # of an environment that is not activated
    return {
        "apiVersion": EXEC_API,
        "command": "windlass" if shutil.which("windlass") else beside,
        "args": ["cluster", "token", cluster.name, "--region", cluster.region],
        "env": [{"name": "AWS_PROFILE", "value": profile}] if profile else None,
        "interactiveMode": "IfAvailable",
    }


def _put(values: dict[str, Any], key: str, entry: dict[str, Any]) -> None:
    entries = values.get(key) or []
    if not isinstance(entries, list) or not all(isinstance(other, dict) for other in entries):
        raise UserError(
            f"the kubeconfig's {key} are no list of named things",
            evidence=str(entries)[:80],
            fix=f"mend the file, or {KUBECONFIG}=OTHER windlass cluster use …",
        )
    names = [other.get("name") for other in entries]
    if entry["name"] in names:
        entries[names.index(entry["name"])] = entry
    else:
        entries.append(entry)
    values[key] = entries
