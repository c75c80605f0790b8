"""Variables whose values are secret: referenced in manifests, read here, sent apart from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.spec import Run


def secret_name(object_name: str) -> str:
    return f"{object_name}-secrets"


def references(run: Run, object_name: str, *, token: str | None = None) -> list[dict[str, Any]]:
    """The container's variables, each a reference; `token` is the variable of the submission's own secret."""
    found = []
    if token:
        found.append({"name": token, "valueFrom": {"secretKeyRef": {"name": secret_name(object_name), "key": token}}})
    for one in run.target.kubernetes.secrets:
        name, _, source = one.partition("=")
        secret, key = secret_name(object_name), name
        if source.startswith("secret:"):
            secret, _, key = source.removeprefix("secret:").partition("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def own_names(run: Run) -> list[str]:
    """The variables that go into the run's own Secret."""
    return [one.partition("=")[0] for one in run.target.kubernetes.secrets if "=secret:" not in one]


def read_values(run: Run, environment: Mapping[str, str]) -> dict[str, str]:
    """The values of the run's own Secret. No error says what a value is."""
    values = {}
    for one in run.target.kubernetes.secrets:
        name, _, source = one.partition("=")
        if source.startswith("secret:"):
            continue
        if source.startswith("file:"):
            path = Path(source.removeprefix("file:")).expanduser()
            try:
                value = path.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise UserError(f"the secret {name} cannot be read from {path}", evidence=reason) from None
        else:
            value = environment.get(name, "")
        if not value:
            raise UserError(
                f"the secret {name} has no value",
                evidence=f"{source.removeprefix('file:')} is empty" if source else f"${name} is not set here",
                fix=f"export {name}=…    or target.kubernetes.secrets=['{name}=file:PATH']",
            )
        values[name] = value
    return values
