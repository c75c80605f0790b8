"""The names, labels and annotations by which a run's objects are found again in a cluster. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import yaml

DOMAIN = "windlass.dev"
RUN_LABEL = f"{DOMAIN}/run"  # the safe name; on every object and pod of a run
SUBMISSION_LABEL = f"{DOMAIN}/submission"  # which submission of the run a pod belongs to
LOOP_LABEL = f"{DOMAIN}/loop"  # on what belongs to the retry loop of a run
NAME_ANNOTATION = f"{DOMAIN}/name"  # the name as the user wrote it
DIGEST_ANNOTATION = f"{DOMAIN}/digest"  # of everything that was asked for: same name and digest, same job
VERSION_ANNOTATION = f"{DOMAIN}/version"
MANAGED_BY = {"app.kubernetes.io/managed-by": "windlass"}

# Operators append to a job's name (`-node-0-12`, `-master-0`), and the result must stay within 63 letters.
LONGEST_NAME = 40
HASH_LETTERS = 6
_SAFE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def safe_name(name: str) -> str:
    """The run's name as Kubernetes takes it for every kind: an RFC 1035 label, with a hash where it had to change."""
    if len(name) <= LONGEST_NAME and _SAFE.fullmatch(name):
        return name
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".rstrip("-")
    kept = plain[: LONGEST_NAME - HASH_LETTERS - 1].rstrip("-")
    return f"{kept}-{hashlib.sha256(name.encode()).hexdigest()[:HASH_LETTERS]}"


def labels_of(name: str) -> dict[str, str]:
    """The labels of every object of the run, given its true name."""
    return {**MANAGED_BY, RUN_LABEL: safe_name(name)}


def selector_of(name: str) -> str:
    return f"{RUN_LABEL}={safe_name(name)}"


def digest_of(request: Mapping[str, Any]) -> str:
    """A digest of what a run asks for: the same for whoever asks it again, on whichever nodes are there by then."""
    text = yaml.safe_dump(dict(request), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
