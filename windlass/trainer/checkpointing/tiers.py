"""What the tiers of a run have in common: they take a step, and offer steps at a resume, nearest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from windlass.checkpoint import FileRecord, Manifest
from windlass.checkpoint.folder import Damage

Describe = Callable[[dict[str, FileRecord]], Manifest]


@dataclass(frozen=True)
class Progress:
    """How far training is: what a manifest says about a step."""

    step: int
    tokens: int
    data_state: dict[str, Any] | None
    validation: dict[str, Any] | None = None  # which validation was the best so far; of saves alone
    sequences: int = 0  # read so far


class Tier(Protocol):
    """All ranks call every method together; `save` from the thread that writes, the others from the main one."""

    name: str
    every: int  # steps between saves

    def save(self, step: int, state: dict[str, Tensor], describe: Describe) -> int:
        """Write and publish a step; its bytes over all ranks. SaveFailedError on all ranks leaves nothing behind."""
        ...


class NearTier(Tier, Protocol):
    """A tier beside the one that lasts, which alone is what a run leaves behind."""

    def offers(self) -> list[Offer]:
        """The published steps of this tier, as far as can be told without reading them."""
        ...

    def clear(self) -> None:
        """Give back the room of everything in the tier."""
        ...


class Offer(Protocol):
    """A published step of a tier, that a resume may take."""

    tier: str
    step: int
    where: str  # for people

    @property
    def manifest(self) -> Manifest:
        """Of a step that is proven."""
        ...

    def prove(self) -> list[Damage]:
        """Whether it can be loaded, as far as that is known before; what is wrong with it, the same on all ranks."""
        ...

    def load(self, state: dict[str, Tensor]) -> list[Damage]:
        """Fill the tensors in place, after a proof that found nothing. What turns out to be damaged while it is read:
        then the tensors are worth nothing, and another step must be loaded.
        """
        ...
