"""The typed run file: the sections of their own files, put together."""

from __future__ import annotations

import re
from typing import Self

from pydantic import model_validator

from windlass.spec.checkpoint import CheckpointSection
from windlass.spec.data import DataSection
from windlass.spec.image import ImageSection
from windlass.spec.notify import NotifySection
from windlass.spec.section import Section
from windlass.spec.target import TargetSection
from windlass.spec.training import ModelSection, ParallelSection, ResourcesSection, TrainSection

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Run(Section):
    """A run file."""

    name: str = ""
    """Name of the run and of its folder under `runs/`. Default: the file's name."""
    model: ModelSection
    data: DataSection
    train: TrainSection = TrainSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resources: ResourcesSection = ResourcesSection()
    image: ImageSection = ImageSection()
    target: TargetSection = TargetSection()
    notify: NotifySection = NotifySection()

    @model_validator(mode="after")
    def name_is_a_folder(self) -> Self:
        if self.name and not RUN_NAME.fullmatch(self.name):
            raise ValueError(
                f"name {self.name!r} is not usable: at most 63 letters, digits, '.', '_' or '-', "
                "starting with a letter or digit"
            )
        return self
