"""The cache folder of this machine, which all runs share."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

CACHE_VARIABLE = "WINDLASS_CACHE"


def cache_root() -> Path:
    """$WINDLASS_CACHE, else windlass below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "windlass"


def name_digest(text: str) -> str:
    """A short file name for something with a long name."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
