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

NEEDED = {"httpx2": "k8s", "wsproto": "k8s"}  # what only some targets import, by the extra that brings it


def target(section: TargetSection) -> Target[Any]:
    """The target that a run file names; only its own folder is imported."""
    return target_of_kind(section.kind)


def target_of_kind(kind: str) -> Target[Any]:
    place = KINDS.get(kind)
    if place is None:
        raise UserError(f"there is no target {kind!r}", evidence=f"targets: {', '.join(KINDS)}", fix="--on local")
    module, name = place.split(":")
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
