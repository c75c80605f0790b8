"""Variables whose values are secret: referenced in manifests, read here, sent apart from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.spec import Run

# What secrets look like: private keys, kubeconfigs, and tokens whose issuers mark them.
SECRET_TEXT = re.compile(
    rb"""^-----BEGIN[ ](?:[A-Z]+[ ])*PRIVATE[ ]KEY-----\s+[A-Za-z0-9+/=]{16}
    | "private_key"\s*:\s*"-----BEGIN
    | ^[ \t]*(?:aws_secret_access_key[ \t]*[=:][ \t]*[A-Za-z0-9/+]{40}|client-key-data:[ \t]*[A-Za-z0-9+/=]{16})
    | \b(?:hf_[A-Za-z0-9]{34}|gh[opsu]_[A-Za-z0-9]{36}|github_pat_\w{60}|glpat-[\w-]{20}|xox[bp]-[\w-]{20})""",
    re.MULTILINE | re.VERBOSE | re.IGNORECASE,
)
SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE|SECRET|SSH)_KEY)$")


def plain_secrets(run: Run) -> list[str]:
    """A warning for every variable that looks like a secret and stands in the run file for all to read."""
    return [
        f"target.kubernetes.{where} holds what looks like a secret: {name}. It is shown by `kubectl get`, printed by "
        f"--dry-run and kept in the run folder; export it here and use target.kubernetes.secrets=['{name}']"
        for where, name, value in _plain_variables(run)
        if _is_secret(name, value)
    ]


def _plain_variables(run: Run) -> Iterator[tuple[str, str, str]]:
    options = run.target.kubernetes
    for name, value in options.environment.items():
        yield "environment", name, value
    for container in options.pod.get("containers") or ():
        for variable in (container.get("env") or ()) if isinstance(container, dict) else ():
            if isinstance(variable, dict) and isinstance(variable.get("value"), str):
                yield "pod", str(variable.get("name")), variable["value"]


def _is_secret(name: str, value: str) -> bool:
    """By the look of the value, or by the name unless the value is a path or a small number."""
    if SECRET_TEXT.search(value.encode(errors="replace")):
        return True
    harmless = not value or value.startswith(("/", "~", "./")) or (value.isdecimal() and len(value) < 6)
    return bool(SECRET_NAME.search(name.upper())) and not harmless


def secret_name(object_name: str) -> str:
    return f"{object_name}-secrets"


def references(run: Run, object_name: str, *, token: str | None = None) -> list[dict[str, Any]]:
    """The container's variables, each a reference; `token` is the variable of the submission's own secret."""
    variables = []
    if token:
        variables.append(
            {"name": token, "valueFrom": {"secretKeyRef": {"name": secret_name(object_name), "key": token}}}
        )
    for named in run.target.kubernetes.secrets:
        name, _, source = named.partition("=")
        secret, key = secret_name(object_name), name
        if source.startswith("secret:"):
            secret, _, key = source.removeprefix("secret:").partition("/")
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return variables


def own_names(run: Run) -> list[str]:
    """The variables that go into the run's own Secret."""
    return [secret.partition("=")[0] for secret in run.target.kubernetes.secrets if "=secret:" not in secret]


def read_values(run: Run, environment: Mapping[str, str]) -> dict[str, str]:
    """The values of the run's own Secret. No error says what a value is."""
    values = {}
    for secret in run.target.kubernetes.secrets:
        name, _, source = secret.partition("=")
        if source.startswith("secret:"):
            continue
        if source.startswith("file:"):
            path = Path(source.removeprefix("file:")).expanduser()
            try:
                value = path.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise UserError(
                    f"the secret {name} cannot be read from {path}",
                    evidence=reason,
                    fix=f"ls -l {path}    or target.kubernetes.secrets=[{name}] takes it from the environment",
                ) from None
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
