"""Stages of a save that all ranks do together: each learns how the others fared, and one failure fails it for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from windlass.errors import UserError
from windlass.trainer.distributed.ranks import Ranks


class SaveFailedError(Exception):
    """A checkpoint could not be written; the same on every rank."""


@dataclass(frozen=True)
class Agreement:
    """Over a group that one thread alone uses, so that its calls never meet those of others."""

    ranks: Ranks
    group: dist.ProcessGroup

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        everyone: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def together(self, action: Callable[[], Any], *, first_rank_only: bool = False) -> list[Any]:
        """Do one stage and return every rank's result; SaveFailedError on all ranks if it failed on any."""
        value, problem = None, None
        if self.ranks.is_first or not first_rank_only:
            try:
                value = action()
            except (Exception, CheckpointException) as error:  # DCP's own is not an Exception
                problem = f"rank {self.ranks.rank}: {root_cause(error)}"
        outcomes = self.gather((value, problem))
        problems = [problem for _, problem in outcomes if problem]
        if problems:
            raise SaveFailedError(problems[0])
        return [value for value, _ in outcomes]


def on_first_rank(ranks: Ranks, action: Callable[[], Any]) -> Any:
    """What rank 0 found, on every rank; a UserError of it is raised on every rank too."""
    value, problem = None, None
    if ranks.is_first:
        try:
            value = action()
        except UserError as error:
            problem = error.as_dict()
    value, problem = ranks.broadcast((value, problem), patient=True)
    if problem:
        raise UserError.from_dict(problem)
    return value


def on_every_rank(ranks: Ranks, action: Callable[[], Any]) -> None:
    """Let every rank do something; a UserError of any of them is raised on all."""
    problem = None
    try:
        action()
    except UserError as error:
        problem = error.as_dict()
    for raised in filter(None, ranks.gather(problem, patient=True)):
        raise UserError.from_dict(raised)


def root_cause(error: BaseException) -> str:
    """The error, below DCP's wrapping, that a person can act on."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = next(iter(failures.items()))
        inner = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"{type(inner).__name__} on rank {rank}: {inner}"
    if isinstance(error, UserError):
        return f"{error.what}: {error.evidence}" if error.evidence else error.what
    return f"{type(error).__name__}: {error}"
