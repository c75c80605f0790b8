"""Put an export on a hub: its repository checked or made before the export, then all files in one commit."""

from __future__ import annotations

import fnmatch
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from windlass.common.hub import (
    LONGEST_DELAY_S,
    LOST_TRIES,
    PASSING,
    TRIES,
    chain,
    first_line,
    import_hub,
    retry_after,
    status_of,
)
from windlass.common.retrying import doubling, retried
from windlass.errors import ExitCode, UserError

log = logging.getLogger(__name__)
Value = TypeVar("Value")
REPOSITORY = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
# What exports write: files of an earlier one that this one does not have would be loaded beside it.
WRITTEN = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "config.json", "generation_config.json")
GIVE_TOKEN = "hf auth login    or export HF_TOKEN=…, with a token that may write"


@dataclass(frozen=True)
class Repository:
    """Where on a hub an export goes."""

    name: str
    revision: str | None = None
    """A branch; None: main."""
    private: bool = False

    @property
    def url(self) -> str:
        branch = f"/tree/{self.revision}" if self.revision else ""
        return f"{import_hub(self.name).constants.ENDPOINT}/{self.name}{branch}"


def check_repository(repository: Repository) -> bool:
    """Raise a UserError unless whoever runs this may push there; whether it exists. Nothing is made."""
    hub = import_hub(repository.name)
    api, name = hub.HfApi(), repository.name
    if not REPOSITORY.fullmatch(name):
        raise UserError(f"{name!r} is no name of a repository", fix="--push OWNER/NAME")
    if hub.constants.is_offline_mode():
        raise UserError(f"{name} cannot be pushed: HF_HUB_OFFLINE forbids asking a hub", fix="unset HF_HUB_OFFLINE")
    if hub.get_token() is None:
        raise UserError(f"pushing to {name} needs a token, and there is none", fix=GIVE_TOKEN)
    account = _asking(api.whoami, name)
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(
            f"the token may not write to {name}", evidence=f"{account.get('name')}'s token reads only", fix=GIVE_TOKEN
        )

    def info() -> Any:
        try:
            return api.repo_info(name)
        except hub.errors.RepositoryNotFoundError:
            return None

    existing = _asking(info, name)
    if existing is None:
        _check_owner(name, account)
        return False
    if repository.private and not existing.private:
        raise UserError(
            f"{name} exists and is public, and --private was given",
            cause="whatever is pushed there, everyone can read",
            fix="another repository, or make this one private in its settings",
        )
    _asking(lambda: api.auth_check(name, write=True), name)
    return True


def _check_owner(name: str, account: dict[str, Any]) -> None:
    owners = [account.get("name"), *(team.get("name") for team in account.get("orgs", []))]
    owner = name.partition("/")[0]
    if owner not in owners:
        raise UserError(
            f"{name} does not exist, and the token may not make it",
            evidence=f"the token is {account.get('name')}'s; owners it may write as: {', '.join(map(str, owners))}",
            fix=f"--push {account.get('name')}/{name.partition('/')[2]}",
        )


def make_repository(repository: Repository) -> None:
    """The repository, and its branch where one was named; what exists stays as it is."""
    api, name = import_hub(repository.name).HfApi(), repository.name
    _asking(lambda: api.create_repo(name, private=repository.private or None, exist_ok=True), name)
    if repository.revision:
        _asking(lambda: api.create_branch(name, branch=repository.revision, exist_ok=True), name)


def push(folder: Path, repository: Repository, *, message: str) -> str:
    """All files of a folder in one commit, whose id is returned: nobody sees half of them. What the hub has already
    is not sent again, and files are read as they are sent."""
    hub = import_hub(repository.name)
    api, name = hub.HfApi(), repository.name
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    added = {path.relative_to(folder).as_posix(): path for path in files}
    present = _asking(lambda: api.list_repo_files(name, revision=repository.revision), name)
    stale = [path for path in present if path not in added and any(fnmatch.fnmatch(path, form) for form in WRITTEN)]
    operations = [hub.CommitOperationAdd(path_in_repo=path, path_or_fileobj=file) for path, file in added.items()]
    operations += [hub.CommitOperationDelete(path_in_repo=path) for path in stale]

    def commit() -> Any:
        return api.create_commit(name, operations, commit_message=message, revision=repository.revision)

    return str(_asking(commit, name).oid)


def _asking(action: Callable[[], Value], name: str) -> Value:
    """Do something that asks the hub; wait out rate limits, outages and broken connections."""

    def pause_after(error: Exception, tries: int) -> float:
        status = status_of(error)
        if status is not None and status not in PASSING:
            raise _refusal(error, status, name) from None
        if status is None and not _is_lost(error):
            raise error
        pause = retry_after(error) or doubling(1.0, tries)
        if tries >= (TRIES if status is not None else LOST_TRIES) or pause > LONGEST_DELAY_S:
            raise UserError(
                f"the hub does not take {name} now",
                evidence=f"{type(error).__name__}: {first_line(error)}, after {tries} tries",
                cause="it limits how often it may be asked" if status == 429 else None,
                fix="the same command again: it sends only what is missing there",
                exit_code=ExitCode.FAILED,
            ) from None
        log.warning("the hub put %s off (%s); asking again in %.0f s", name, first_line(error), pause)
        return pause

    return retried(action, pause_after=pause_after)


def _is_lost(error: Exception) -> bool:
    """Whether a request never reached the hub, or its answer never came back."""
    kinds = {kind.__name__ for link in chain(error) for kind in type(link).__mro__}
    return bool(kinds & {"ConnectionError", "TimeoutError", "TransportError"})


def _refusal(error: Exception, status: int, name: str) -> UserError:
    if status == 401:
        what, fix = f"the hub does not accept the token that was sent for {name}", GIVE_TOKEN
    elif status == 403:
        what, fix = f"the token may not write to {name}", GIVE_TOKEN
    elif status in (409, 412):
        what, fix = f"{name} was changed by somebody else at the same moment", "the same command again"
    else:
        what, fix = f"the hub refused {name}", None
    return UserError(what, evidence=first_line(error), fix=fix)
