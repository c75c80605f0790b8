"""Merge a raw pod spec of the user's into a rendered one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Lists of things that have a key of their own: merged thing by thing, as `kubectl patch` does.
KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
}
ONE_SOURCE = frozenset(("env", "volumes"))  # a variable or volume from elsewhere is not the old one with more
ADDED = frozenset(("tolerations", "topologySpreadConstraints"))  # lists whose members stand beside each other
TRAINER = "trainer"  # what users call the ranks' container, whatever the job kind wants it to be called


def merge_pod(spec: Mapping[str, Any], overlay: Mapping[str, Any], *, container: str) -> dict[str, Any]:
    """`spec` with `overlay` on top; the overlay's container `trainer` is the one called `container`."""
    renamed = dict(overlay)
    if "containers" in renamed:
        renamed["containers"] = [
            {**one, "name": container} if one.get("name") == TRAINER else one for one in renamed["containers"]
        ]
    return _merge(spec, renamed)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        there = merged.get(key)
        if value is None:  # as in a merge patch: nothing here, please
            merged.pop(key, None)
        elif isinstance(there, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(there, value)
        elif isinstance(there, list) and isinstance(value, list | tuple) and key in KEYS:
            merged[key] = _merge_named(there, list(value), key)
        elif isinstance(there, list) and isinstance(value, list | tuple) and key in ADDED:
            merged[key] = [*there, *(one for one in value if one not in there)]
        else:
            merged[key] = list(value) if isinstance(value, tuple) else value
    return merged


def _merge_named(below: list[Any], above: list[Any], what: str) -> list[Any]:
    merged, key = list(below), KEYS[what]
    for one in above:
        index = next((i for i, there in enumerate(merged) if there.get(key) == one.get(key)), None)
        if index is None:
            merged.append(one)
        elif what in ONE_SOURCE and set(one) != set(merged[index]):
            merged[index] = dict(one)
        else:
            merged[index] = _merge(merged[index], one)
    return merged
