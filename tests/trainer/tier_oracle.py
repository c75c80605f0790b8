"""What a resume must find, worked out from the files alone and without the code under test."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def newest_complete(
    nodes: list[Path], checkpoints: Path, stored: dict[str, bytes], world_size: int
) -> tuple[int, str] | None:
    """The newest step that any tier has whole, and the nearest tier that has it."""
    found = {
        "memory": _pieces([node / "memory" for node in nodes], world_size),
        "local": _pieces([node / "disk" for node in nodes], world_size),
        "shared": _folder_steps(checkpoints),
        "store": _stored_steps(stored),
    }
    every = [(step, -index, tier) for index, (tier, steps) in enumerate(found.items()) for step in steps]
    return (max(every)[0], max(every)[2]) if every else None


def _pieces(places: list[Path], world_size: int) -> set[int]:
    """Steps whose manifest is on some node and each of whose pieces is whole on some node."""
    whole: set[int] = set()
    for manifest in (path for place in places for path in place.glob("*/step-*/manifest.json")):
        body = _body(manifest.read_bytes())
        step = manifest.parent.relative_to(manifest.parents[2])
        if body is None or body["world_size"] != world_size:
            continue
        copies = {name: [path for place in places for path in place.glob(f"{step}/{name}")] for name in body["files"]}
        if all(any(_is(one.read_bytes(), body["files"][name]) for one in copies[name]) for name in copies):
            whole.add(body["step"])
    return whole


def _folder_steps(checkpoints: Path) -> set[int]:
    whole = set()
    for manifest in checkpoints.glob("step-*/manifest.json"):
        body = _body(manifest.read_bytes())
        files = body["files"] if body else {}
        present = {name: manifest.parent / name for name in files}
        if body and all(value.is_file() and _is(value.read_bytes(), files[name]) for name, value in present.items()):
            whole.add(body["step"])
    return whole


def _stored_steps(stored: dict[str, bytes]) -> set[int]:
    """Of the contents of a bucket."""
    whole = set()
    for key, content in stored.items():
        if not key.endswith("/manifest.json"):
            continue
        body, folder = _body(content), key.removesuffix("manifest.json")
        if body and all(_is(stored.get(folder + name, b""), record) for name, record in body["files"].items()):
            whole.add(body["step"])
    return whole


def _body(text: bytes) -> dict[str, Any] | None:
    try:
        body: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    checksum = body.pop("checksum", None)
    ours = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return body if checksum == ours else None


def _is(content: bytes, record: dict[str, Any]) -> bool:
    return len(content) == record["size"] and hashlib.sha256(content).hexdigest() == record["sha256"]
