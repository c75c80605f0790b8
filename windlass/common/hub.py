"""Hub access: fetch files of repositories, check access before anything is paid for, wait out what passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from windlass.common.retrying import doubling, retried
from windlass.errors import ExitCode, UserError

log = logging.getLogger(__name__)
Value = TypeVar("Value")

TRIES = 6  # of a request that the hub put off
LOST_TRIES = 2  # of one that never reached it: the library below has tried several times by then
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 300.0  # a hub that asks for more patience than this is not waited for
PASSING = {408, 425, 429, 500, 502, 503, 504}
ACCESS = "https://huggingface.co"


def is_hub_id(path: str) -> bool:
    """Whether a path means a repository on a hub rather than a folder here."""
    return not (path.startswith((".", "/", "~")) or Path(path).is_dir() or path.count("/") != 1)


def local_folder(path: str, *, files: tuple[str, ...], what: str) -> Path:
    """The folder that a path means; of a hub id the one its files are in here, fetched where they are not."""
    if not is_hub_id(path):
        return Path(path).expanduser()
    here = fetched(path, files)
    if here is not None and all((here / name).is_file() for name in files):
        return here  # every rank of a run comes here: one of them asked the hub
    return fetch(path, files, what=what)


def fetch(hub_id: str, files: tuple[str, ...], *, what: str, revision: str | None = None, kind: str = "model") -> Path:
    """Files of a repository by name or pattern, downloaded unless this machine has them."""
    hub = import_hub(hub_id)

    def snapshot() -> Path:
        return Path(hub.snapshot_download(hub_id, revision=revision, repo_type=kind, allow_patterns=list(files)))

    return with_retries(snapshot, hub_id, what)


def fetched(hub_id: str, files: tuple[str, ...], *, revision: str | None = None, kind: str = "model") -> Path | None:
    """The folder of a repository whose files are on this machine already; the hub is not asked."""
    hub = import_hub(hub_id)
    try:
        return Path(
            hub.snapshot_download(
                hub_id, revision=revision, repo_type=kind, allow_patterns=list(files), local_files_only=True
            )
        )
    except Exception as error:  # LocalEntryNotFoundError, of whichever module this version keeps it in
        log.debug("%s is not here: %s", hub_id, error)
        return None


def check_access(
    hub_id: str, *, what: str, revision: str | None = None, kind: str = "model", anonymously: bool = False
) -> None:
    """Raise a UserError unless the hub would give this repository to whoever runs this, or to anybody. Nothing is
    downloaded."""
    hub = import_hub(hub_id)
    if hub.constants.is_offline_mode():
        if fetched(hub_id, ("config.json", "*.json"), revision=revision, kind=kind) is None:
            raise UserError(
                f"the {what} {hub_id} is not on this machine, and HF_HUB_OFFLINE forbids asking for it",
                fix=f"hf download {hub_id}    on a machine that may, into a shared HF_HOME; or unset HF_HUB_OFFLINE",
            )
        return

    def ask() -> None:
        asking = hub.HfApi(token=False if anonymously else None)
        facts = asking.repo_info(hub_id, repo_type=kind, revision=revision, timeout=10)
        if getattr(facts, "gated", False):
            asking.auth_check(hub_id, repo_type=kind)

    with_retries(ask, hub_id, what, lost=False)


def with_retries(
    action: Callable[[], Value],
    hub_id: str,
    what: str,
    *,
    lost: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> Value:
    """Do something that asks a hub; wait out rate limits and, with `lost`, connections that fail or break.

    Whatever else the hub says is an answer.
    """

    def pause_after(error: Exception, tries: int) -> float:
        refused = refusal(error, hub_id, what)
        if refused is not None:
            raise refused from None
        requested = retry_after(error)
        pause = doubling(FIRST_DELAY_S, tries) if requested is None else requested
        most = TRIES if status_of(error) is not None else LOST_TRIES if lost else 1
        if tries >= most or pause > LONGEST_DELAY_S:
            raise unreachable(error, hub_id, what, tries) from None
        log.warning("the hub put off %s %s (%s); asking again in %.0f s", what, hub_id, first_line(error), pause)
        return pause

    return retried(action, pause_after=pause_after, sleep=sleep)


def refusal(error: Exception, hub_id: str, what: str) -> UserError | None:
    """What an answer of the hub means that will not change by waiting; None where it may."""
    names = {kind.__name__ for kind in type(error).__mro__}
    status = status_of(error)
    evidence = first_line(error)
    if "GatedRepoError" in names:
        return UserError(
            f"the hub does not give the {what} {hub_id} to you: access to it must be granted first",
            evidence=evidence,
            cause="no token was sent" if not has_token() else "the token that was sent belongs to no one with access",
            fix=f"ask for access at {ACCESS}/{hub_id}, then: hf auth login    or export HF_TOKEN=…",
        )
    if "RevisionNotFoundError" in names:
        return UserError(
            f"the {what} {hub_id} has no such revision", evidence=evidence, fix="model.revision=main, a tag or a commit"
        )
    if status == 401 or "RepositoryNotFoundError" in names:
        if status == 401 and has_token():
            return UserError(
                f"the hub does not accept the token that was sent for the {what} {hub_id}, or has nothing of that name",
                evidence=evidence,
                fix="hf auth whoami    says who the token belongs to; hf auth login    gives a new one",
            )
        return UserError(
            f"there is no {what} {hub_id} on the hub, or it is private",
            evidence=evidence,
            fix="check the name; a private one needs HF_TOKEN (hf auth login)",
        )
    if status == 403:
        return UserError(
            f"the hub forbids the {what} {hub_id} to this token",
            evidence=evidence,
            fix="a token with read access to it: hf auth login    or export HF_TOKEN=…",
        )
    if status == 404 or ("EntryNotFoundError" in names and "LocalEntryNotFoundError" not in names):
        return UserError(
            f"the {what} {hub_id} is not on the hub, or not all of it",
            evidence=evidence,
            fix="check the name and the revision on https://huggingface.co",
        )
    if status is not None and status not in PASSING:
        return UserError(
            f"the hub refused the {what} {hub_id}",
            evidence=evidence,
            fix="hf auth whoami    says who the token belongs to",
        )
    return None


def unreachable(error: Exception, hub_id: str, what: str, tries: int) -> UserError:
    return UserError(
        f"the {what} {hub_id} cannot be fetched from the hub",
        evidence=f"{type(error).__name__}: {first_line(error)}" + (f", after {tries} tries" if tries > 1 else ""),
        cause="it limits how often it may be asked" if status_of(error) == 429 else "it is not reachable from here",
        fix="HF_TOKEN raises the limit"
        if status_of(error) == 429
        else "set HF_ENDPOINT or HTTPS_PROXY, or give a folder",
        exit_code=ExitCode.FAILED,
    )


def retry_after(error: Exception) -> float | None:
    """Seconds that the hub asked to wait."""
    for link in chain(error):
        headers: Any = getattr(getattr(link, "response", None), "headers", None) or {}
        text = headers.get("Retry-After")
        if text and str(text).strip().isdigit():
            return float(text)
    return None


def status_of(error: BaseException) -> int | None:
    for link in chain(error):
        status = getattr(getattr(link, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def import_hub(hub_id: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
    except ImportError:
        raise UserError(
            f"{hub_id} is on a hub and huggingface_hub is not installed", fix="pip install 'windlass[train]'"
        ) from None
    return huggingface_hub
