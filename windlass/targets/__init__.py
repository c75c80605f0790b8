"""Places where a run can go: one folder each, found by the kind in the run file's target section."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.spec.target import TargetSection
    from windlass.targets.protocol import Target

KINDS = {
    "local": "windlass.targets.local.client:LocalTarget",
    "slurm": "windlass.targets.slurm.client:SlurmTarget",
    "kubernetes": "windlass.targets.kubernetes.client:KubernetesTarget",
}

# What stands after the colon in `--on kubernetes:CONTEXT`, as a key of the run file.
CLUSTER_KEYS = {"slurm": "target.host", "kubernetes": "target.kubernetes.context"}

NEEDED = {"httpx2": "k8s", "wsproto": "k8s"}  # what only some targets import, by the extra that brings it


def target(section: TargetSection) -> Target[Any]:
    """The target that a run file names; only its own folder is imported."""
    return target_of_kind(section.kind)


def parse_place(text: str) -> tuple[str, str | None]:
    """The kind of target that `--on` names, and the cluster: `kubernetes:CONTEXT`, `slurm:LOGIN_NODE`."""
    kind, _, cluster = text.partition(":")
    if kind not in KINDS:
        raise _unknown(kind)
    if cluster and kind not in CLUSTER_KEYS:
        raise UserError(f"--on {text}: the target {kind} takes no name after the colon", fix=f"--on {kind}")
    return kind, cluster or None


def place_settings(text: str) -> dict[str, str]:
    """What `--on` sets in a run file, by key."""
    kind, cluster = parse_place(text)
    return {"target.kind": kind, **({CLUSTER_KEYS[kind]: cluster} if cluster else {})}


def target_of_kind(kind: str) -> Target[Any]:
    if kind not in KINDS:
        raise _unknown(kind)
    module, name = KINDS[kind].split(":")
    try:
        made: Target[Any] = getattr(import_module(module), name)()
    except ModuleNotFoundError as error:
        extra = NEEDED.get(error.name or "")
        if extra is None:
            raise
        raise UserError(
            f"the target {kind} needs {error.name}, which is not installed", fix=f"pip install 'windlass[{extra}]'"
        ) from None
    return made


def _unknown(kind: str) -> UserError:
    from windlass.spec.loading import nearest_choice  # pydantic: nothing that completing --on should wait for

    near = nearest_choice(kind, list(KINDS))
    return UserError(
        f"there is no target {kind!r}",
        evidence=f"targets: {', '.join(KINDS)}",
        fix=f"--on {near or 'local'}",
    )
