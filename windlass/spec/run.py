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
    code: str | None = None
    """Folder with your own Python code, for keys such as `model.class` and `train.loss`: first on the path of every
    rank, and sent with a job on Kubernetes. Default: the folder in which `windlass run` is typed."""
    model: ModelSection
    data: DataSection
    train: TrainSection = TrainSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resources: ResourcesSection = ResourcesSection()
    image: ImageSection = ImageSection()
    target: TargetSection = TargetSection()
    notify: NotifySection = NotifySection()

    def own_code(self) -> list[tuple[str, str]]:
        """What the run takes from code of the user's own: key of the run file and import path."""
        sources = (("data.source", self.data.source), ("data.validation_source", self.data.validation_source))
        named = [
            ("model.class", self.model.own_class),
            ("train.loss", self.train.loss),
            ("train.optimizer", self.train.optimizer),
            *(("train.callbacks", path) for path in self.train.callbacks),
            *((key, text.removeprefix("python:")) for key, text in sources if text and text.startswith("python:")),
        ]
        return [(key, path) for key, path in named if path]

    @model_validator(mode="after")
    def name_is_a_folder(self) -> Self:
        if self.name and not RUN_NAME.fullmatch(self.name):
            raise ValueError(
                f"name {self.name!r} is not usable: at most 63 letters, digits, '.', '_' or '-', "
                "starting with a letter or digit"
            )
        return self
