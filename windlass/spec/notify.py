"""The `notify` section of the run file: who is told what happens to a run, and how."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from windlass.spec.section import Section

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Occasion = Literal["end", "failure", "retry", "stall"]


class NotifySection(Section):
    """Who is told what happens to the run. Keys that are missing come from `~/.config/windlass/notify.yaml`."""

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
            raise ValueError("notify.email needs notify.smtp_host and notify.sender")
        if self.smtp_user and not self.smtp_password:
            raise ValueError("notify.smtp_user needs notify.smtp_password")
        return self

    @property
    def has_receivers(self) -> bool:
        return bool(self.webhook or self.email)
