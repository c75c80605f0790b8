"""Tags that say what is in an image: the commit, and a hash of everything that goes into the build."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

SHORT = 12


@dataclass(frozen=True)
class Commit:
    """Where a folder stands in its git repository."""

    revision: str
    changed: bool
    """Whether files differ from the commit."""
    source: str | None
    """The remote, without user and password."""


def commit_of(folder: Path) -> Commit | None:
    """None where the folder is in no git repository, or git is not installed."""
    revision = _git(folder, "rev-parse", "--verify", "HEAD")
    if not revision:
        return None
    return Commit(
        revision=revision,
        changed=bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")),
        source=_without_secrets(_git(folder, "remote", "get-url", "origin")),
    )


def content_digest(dockerfile: str, files: str, platform: str, arguments: Mapping[str, str], target: str | None) -> str:
    """Of everything that decides what is built; the builder and the machine do not."""
    parts = {"dockerfile": dockerfile, "files": files, "platform": platform, "target": target or ""}
    text = json.dumps(parts | {"arguments": dict(sorted(arguments.items()))}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def tag_for(commit: Commit | None, content: str) -> str:
    """`git-1a2b3c4d5e6f-0123456789ab`: the same files give the same tag; other files, another."""
    where = f"git-{commit.revision[:SHORT]}-" if commit else "files-"
    return f"{where}{content[:SHORT]}"


def _git(folder: Path, *arguments: str) -> str:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _without_secrets(url: str) -> str | None:
    if not url:
        return None
    if "://" not in url:
        return re.sub(r"^[^@/]*@", "", url)  # git@host:path
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
