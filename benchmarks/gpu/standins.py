"""Inert stand-ins for third-party packages that a contestant imports but a measured step never uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What torchtitan 0.2.2 imports at start-up for data sets, its command line and its dashboards.
UNUSED = ("datasets", "torchdata", "tyro", "tensorboard", "google", "wandb", "rich")


class StandIn(ModuleType):
    """A module in which every capital name is an empty class to inherit from, every other one a module like this."""

    __path__: list[str] = []  # noqa: RUF012  a package: submodules are stand-ins too
    __version__ = "999"  # new enough for whoever asks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Inert,), {}) if name[0].isupper() else StandIn(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Inert:
    """Its methods are decorators that change nothing: torchtitan registers rules for a command line it never reads."""

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda decorated: decorated


class StandInFinder(MetaPathFinder, Loader):
    """Asked last, so that a package that is installed is always the real one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in UNUSED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def stand_in_for_missing() -> None:
    sys.meta_path.append(StandInFinder())
