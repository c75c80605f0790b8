"""Who we are to a registry: from the environment, from what docker and podman know, or from ECR. Never printed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.image.build.process import capture
from windlass.image.registry.reference import HUB

USER_VARIABLE, PASSWORD_VARIABLE = "WINDLASS_REGISTRY_USER", "WINDLASS_REGISTRY_PASSWORD"
HUB_KEY = "https://index.docker.io/v1/"
MEMORY_FOLDER = "/dev/shm"


@dataclass(frozen=True)
class Credentials:
    """A user and a password, or a token in its place."""

    user: str
    password: str = field(repr=False)

    @classmethod
    def from_basic(cls, text: str) -> Credentials:
        user, _, password = base64.b64decode(text).decode().partition(":")
        return cls(user, password)

    @property
    def basic(self) -> str:
        return base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

    def as_auth_file(self, registry: str) -> str:
        return json.dumps({"auths": {registry: {"auth": self.basic}}})


def find_credentials(registry: str, environment: Mapping[str, str] = os.environ) -> Credentials | None:
    """From our two variables; else from the files and helpers that docker and podman keep. None: we are nobody."""
    user, password = environment.get(USER_VARIABLE), environment.get(PASSWORD_VARIABLE)
    if user and password:
        return Credentials(user, password)
    if user or password:
        missing = PASSWORD_VARIABLE if user else USER_VARIABLE
        raise UserError(f"{missing} is not set", fix=f"set both {USER_VARIABLE} and {PASSWORD_VARIABLE}, or neither")
    for path in _auth_files(environment):
        if credentials := _from_file(path, registry):
            return credentials
    return None


@contextlib.contextmanager
def in_memory(
    credentials: Credentials | None, registry: str, *, as_folder: bool
) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """Where a builder reads them, and the descriptors that it inherits. Never a file on disk, never its command line.

    `as_folder`: for docker, one in memory (tmpfs), readable by us only, and gone at once. For the others a file without
    a name: only a child that inherits the descriptor can read it, by the path of its own descriptor.
    """
    if credentials is None:
        yield None, ()
    elif not as_folder:
        with open(os.memfd_create("auth"), "w") as file:
            file.write(credentials.as_auth_file(registry))
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}", (file.fileno(),)
    elif not os.path.ismount(MEMORY_FOLDER):
        raise UserError(
            "docker reads credentials from a folder, and this machine has no folder in memory to put them in",
            fix=f"docker login {registry}    then push again, without {PASSWORD_VARIABLE}",
        )
    else:
        with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER, prefix="windlass-") as folder:  # for its owner alone
            _fill_docker_folder(Path(folder), credentials, registry)
            yield folder, ()


def _fill_docker_folder(folder: Path, credentials: Credentials, registry: str) -> None:
    """docker's own settings with these credentials alone: its contexts and certificates lead to the daemon."""
    own = _docker_folder(os.environ)
    config = _read_json(own / "config.json")
    for key in ("auths", "credsStore", "credHelpers"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | json.loads(credentials.as_auth_file(registry))))
    if own.is_dir():
        for entry in own.iterdir():
            if entry.name != "config.json":
                (folder / entry.name).symlink_to(entry.absolute())


def _auth_files(environment: Mapping[str, str]) -> Iterator[Path]:
    """Where podman and docker look, in that order."""
    home = Path(environment.get("HOME", "~")).expanduser()
    if environment.get("REGISTRY_AUTH_FILE"):
        yield Path(environment["REGISTRY_AUTH_FILE"])
    runtime = environment.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    yield Path(runtime) / "containers" / "auth.json"
    yield Path(f"/run/containers/{os.getuid()}/auth.json")
    yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "containers" / "auth.json"
    yield _docker_folder(environment) / "config.json"


def _docker_folder(environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("HOME", "~")).expanduser()
    return Path(environment.get("DOCKER_CONFIG") or home / ".docker")


def _read_json(path: Path) -> dict[str, Any]:
    """Empty where there is none that can be read."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _from_file(path: Path, registry: str) -> Credentials | None:
    """What the file holds itself, else what the helper says that it names for the registry."""
    config = _read_json(path)
    keys = [registry, f"https://{registry}", f"https://{registry}/v1/"] + ([HUB_KEY] if registry == HUB else [])
    auths, helpers = _mapping(config, "auths"), _mapping(config, "credHelpers")
    for key in keys:
        if basic := _mapping(auths, key).get("auth"):
            return Credentials.from_basic(basic)
        helper = helpers.get(key) or (config.get("credsStore") if key in auths else None)
        if helper and (credentials := _from_helper(helper, key)):
            return credentials
    return None


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Empty where the file holds something else there: another program wrote it, and others may know the registry."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _from_helper(helper: str, registry: str) -> Credentials | None:
    try:
        answer = capture([f"docker-credential-{helper}", "get"], text_in=registry, timeout=60)
    except UserError:  # it is not installed
        return None
    values = json.loads(answer.stdout) if answer.succeeded else None
    return Credentials(values["Username"], values["Secret"]) if values else None
