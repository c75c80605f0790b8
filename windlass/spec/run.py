"""The typed run file: the sections put together, and `notify`, who is told what happens to a run."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from windlass.spec.checkpoint import CheckpointSection
from windlass.spec.data import DataSection
from windlass.spec.image import ImageSection
from windlass.spec.section import Section, SettingError
from windlass.spec.target import TargetSection
from windlass.spec.training import ModelSection, ParallelSection, ResourcesSection, TrainSection

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Occasion = Literal["end", "failure", "retry", "stall"]


class NotifySection(Section):
    """Who is told what happens to the run. Keys that have their default come from `~/.config/windlass/notify.yaml`."""

    events: tuple[Occasion, ...] = ("end", "failure", "retry", "stall")
    """What is told: a good end or a stop, a failure, a restart, a hang."""
    webhook: str | None = None
    """Name of the environment variable that holds the address of a webhook. It is called with JSON that Slack
    understands."""
    email: tuple[str, ...] = ()
    """Addresses that get an e-mail. Needs `smtp_host` and `sender`."""
    sender: str | None = None
    """Address that e-mails come from."""
    smtp_host: str | None = None
    """Server that takes the e-mails."""
    smtp_port: Annotated[int, Field(ge=1, le=65535)] = 587
    """Its port."""
    smtp_security: Literal["starttls", "tls", "none"] = "starttls"
    """How the connection is encrypted. `none` only inside a machine."""
    smtp_user: str | None = None
    """Name to sign in with."""
    smtp_password: str | None = None
    """Name of the environment variable that holds the password."""

    @field_validator("webhook", "smtp_password")
    @classmethod
    def is_a_variable(cls, value: str | None) -> str | None:
        """The run file is printed, sent and kept: a secret has no place in it."""
        if value is not None and not VARIABLE.fullmatch(value):
            raise ValueError("give the NAME of the environment variable that holds it, not the secret itself")
        return value

    @model_validator(mode="after")
    def email_is_complete(self) -> Self:
        if self.email and not (self.smtp_host and self.sender):
            missing = "smtp_host" if not self.smtp_host else "sender"
            example = {"smtp_host": "smtp.example.com", "sender": "windlass@example.com"}[missing]
            raise SettingError("notify.email needs notify.smtp_host and notify.sender", f"notify.{missing}", example)
        if self.smtp_user and not self.smtp_password:
            raise SettingError(
                "notify.smtp_user needs notify.smtp_password",
                "notify.smtp_password",
                "SMTP_PASSWORD",
                "    the environment variable that holds it",
            )
        return self

    @property
    def has_receivers(self) -> bool:
        return bool(self.webhook or self.email)


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
            *(("train.loggers", path) for path in self.train.loggers if ":" in path),
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
