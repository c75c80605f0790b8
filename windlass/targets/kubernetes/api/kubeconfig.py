"""Which cluster, as whom: contexts of kubeconfig files, as kubectl reads them, or the pod's own service account."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.errors import NoAnswerError, UserError

KUBECONFIG = "KUBECONFIG"
IN_CLUSTER = "in-cluster"  # the name of the context that a pod has without any file
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NEW_FILE = "windlass cluster use NAME --region REGION    (EKS, HyperPod) or KUBECONFIG=FILE"


@dataclass(frozen=True)
class Access:
    """One cluster and one user of it."""

    context: str
    namespace: str
    server: str
    cluster: Mapping[str, Any] = field(repr=False)
    user: Mapping[str, Any] = field(repr=False)
    user_name: str
    cluster_folder: Path  # what relative paths of the two entries are relative to; absolute ones stay what they are
    user_folder: Path
    source: str


@dataclass(frozen=True)
class _Entry:
    value: Mapping[str, Any]
    folder: Path


@dataclass
class _Config:
    """Files merged as kubectl merges them: the first to name something wins."""

    paths: list[Path]
    current: str | None = None
    contexts: dict[str, _Entry] = field(default_factory=dict)
    clusters: dict[str, _Entry] = field(default_factory=dict)
    users: dict[str, _Entry] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return ", ".join(map(str, self.paths))


def access(context: str | None = None, namespace: str | None = None) -> Access:
    """The access that a context gives; the current one by default."""
    paths = kubeconfig_files()
    if not paths:
        if (SERVICE_ACCOUNT / "token").is_file() and context in (None, IN_CLUSTER):
            return _in_cluster(namespace)
        named = os.environ.get(KUBECONFIG)
        raise NoAnswerError(
            "no Kubernetes cluster is configured here",
            evidence=f"${KUBECONFIG} names no file that is there: {named}" if named else "there is no ~/.kube/config",
            fix=NEW_FILE,
        )
    config = read_all(paths)
    name = context or config.current
    if not name:
        raise UserError(
            f"no context is chosen in {config.source}",
            evidence=_known(config),
            fix="kubectl config use-context NAME    or --on kubernetes:NAME",
        )
    if name not in config.contexts:
        near = difflib.get_close_matches(name, config.contexts, 1) or list(config.contexts)[:1]
        chosen = f"--on kubernetes:{near[0]}, or --context {near[0]} of cluster commands" if near else NEW_FILE
        raise UserError(
            f"there is no context {name!r} in {config.source}",
            evidence=_known(config),
            fix=f"{chosen}    kubectl config get-contexts lists them",
        )
    entry = config.contexts[name].value
    cluster = _entry_of(config, "cluster", str(entry.get("cluster") or ""), config.clusters, name)
    user_name = str(entry.get("user") or "")
    user = _entry_of(config, "user", user_name, config.users, name) if user_name else _Entry({}, Path())
    return Access(
        context=name,
        namespace=namespace or str(entry.get("namespace") or "default"),
        server=str(cluster.value.get("server") or ""),
        cluster=cluster.value,
        user=user.value,
        user_name=user_name,
        cluster_folder=cluster.folder,
        user_folder=user.folder,
        source=config.source,
    )


def kubeconfig_files() -> list[Path]:
    """The files that kubectl would read, less those that are not there."""
    named = os.environ.get(KUBECONFIG)
    paths = [Path(part) for part in named.split(os.pathsep) if part] if named else [Path.home() / ".kube" / "config"]
    return [path for path in paths if path.is_file()]


def _in_cluster(namespace: str | None) -> Access:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    own = SERVICE_ACCOUNT / "namespace"
    return Access(
        context=IN_CLUSTER,
        namespace=namespace or (own.read_text().strip() if own.is_file() else "default"),
        server=f"https://{host}:{port}",
        cluster={"certificate-authority": str(SERVICE_ACCOUNT / "ca.crt")},
        user={"tokenFile": str(SERVICE_ACCOUNT / "token")},
        user_name="the pod's service account",
        cluster_folder=SERVICE_ACCOUNT,
        user_folder=SERVICE_ACCOUNT,
        source=str(SERVICE_ACCOUNT),
    )


def read_all(paths: list[Path]) -> _Config:
    config = _Config(paths)
    for path in paths:
        values = read(path)
        config.current = config.current or str(values.get("current-context") or "") or None
        for key, single, known in (
            ("contexts", "context", config.contexts),
            ("clusters", "cluster", config.clusters),
            ("users", "user", config.users),
        ):
            entries = values.get(key) or []
            for entry in entries if isinstance(entries, list) else (entries,):
                value = (entry.get(single) or {}) if isinstance(entry, dict) else None
                if not isinstance(value, dict):
                    raise UserError(
                        f"{path} is no kubeconfig: {key} is a list of names, each with a {single}",
                        evidence=f"{key}: {str(entry)[:80]}",
                        fix=NEW_FILE,
                    )
                if entry.get("name"):
                    known.setdefault(str(entry["name"]), _Entry(value, path.parent))
    return config


def read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, yaml.YAMLError, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]  # an unhashable key is a TypeError
        raise UserError(f"the kubeconfig {path} cannot be read", evidence=reason, fix=NEW_FILE) from None
    if values is not None and not isinstance(values, dict):
        raise UserError(f"{path} is no kubeconfig: it holds a {type(values).__name__}", fix=NEW_FILE)
    return values or {}


def _entry_of(config: _Config, what: str, name: str, known: Mapping[str, _Entry], context: str) -> _Entry:
    if name in known:
        return known[name]
    raise UserError(
        f"the context {context!r} names the {what} {name!r}, which {config.source} does not have",
        evidence=f"{what}s there: {', '.join(known) or 'none'}",
        fix=f"kubectl config set-context {context} --{what}=NAME",
    )


def _known(config: _Config) -> str:
    return f"contexts there: {', '.join(config.contexts) or 'none'}"
