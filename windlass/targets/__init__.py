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
}


def target(section: TargetSection) -> Target[Any]:
    """The target that a run file names; only its own folder is imported."""
    return target_of_kind(section.kind)


def target_of_kind(kind: str) -> Target[Any]:
    place = KINDS.get(kind)
    if place is None:
        raise UserError(f"there is no target {kind!r}", evidence=f"targets: {', '.join(KINDS)}", fix="--on local")
    module, name = place.split(":")
    made: Target[Any] = getattr(import_module(module), name)()
    return made
