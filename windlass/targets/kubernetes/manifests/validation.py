"""Check rendered objects against OpenAPI schemas: the reduced ones that windlass ships, or those a cluster serves."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from windlass.errors import UserError
from windlass.targets.kubernetes.manifests.cluster_facts import Served

Schema = Mapping[str, Any]
FOLDER = "schemas"
SHARED = "shared.json"
TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list, tuple),
    "object": (Mapping,),
}


def validate(objects: Sequence[Mapping[str, Any]], served: Served | None = None) -> None:
    """Raise UserError for an object that no supported version of its kind takes."""
    served_kinds = {part.kind: part for part in served.kinds.values()} if served else {}
    for value in objects:
        kind = str(value["kind"])
        as_served = served_kinds.get(kind)
        if as_served and as_served.schema is not None:
            mistakes = check_against(as_served.schema, value)
        else:
            by_version = [mistakes_in(value, version) for version in versions_of(kind)]
            mistakes = by_version[-1] if all(by_version) else []
        if mistakes:
            raise UserError(
                f"the {kind} {value['metadata'].get('name')} would not be taken",
                evidence="\n".join(mistakes[:5]),
                cause="a key of target.kubernetes.pod, or a version of the operator that windlass does not know",
                fix="--dry-run    shows what is sent",
            )


def versions_of(kind: str) -> list[str]:
    """The versions of a kind for which there is a schema, the oldest first."""
    versions = [version for version, kinds in _schemas().items() if kind in kinds]
    if not versions:
        raise KeyError(f"there is no schema of {kind}")
    return versions


def mistakes_in(manifest: Mapping[str, Any], version: str) -> list[str]:
    """What is wrong with a manifest by one version's schema: `pytorchjob-1.9`, say."""
    return check_against(_schemas()[version][str(manifest["kind"])], manifest)


def schema_of(version: str, kind: str) -> Schema:
    """The whole schema of a kind, with the shared parts in their places."""
    whole = _inlined(_schemas()[version][kind])
    assert isinstance(whole, Mapping)
    return whole


def check_against(schema: Schema, manifest: Mapping[str, Any]) -> list[str]:
    """What is wrong with a manifest by an OpenAPI v3 schema: unknown fields, wrong types and values, missing fields."""
    return list(_check(schema, manifest, ""))


def _check(schema: Schema, value: Any, path: str) -> Iterator[str]:
    schema = _resolved(schema)
    if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string":
        if not isinstance(value, int | float | str) or isinstance(value, bool):
            yield f"{path}: a number or text is expected, not {value!r}"
        return
    wanted = str(schema.get("type") or "")
    if value is None:
        if not schema.get("nullable") and wanted:
            yield f"{path}: {wanted} is expected, not null"
        return
    if wanted in TYPES and (not isinstance(value, TYPES[wanted]) or (isinstance(value, bool) and wanted != "boolean")):
        yield f"{path}: {wanted} is expected, not {value!r}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, Mapping):
        yield from _check_object(schema, value, path)
    elif isinstance(value, list | tuple) and "items" in schema:
        for index, item in enumerate(value):
            yield from _check(schema["items"], item, f"{path}[{index}]")


def _check_object(schema: Schema, value: Mapping[str, Any], path: str) -> Iterator[str]:
    known = schema.get("properties") or {}
    others = schema.get("additionalProperties")
    free = schema.get("x-kubernetes-preserve-unknown-fields") or (not known and others in (None, True))
    if not path:  # every object has these, whether its schema says so or not
        known = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, **known, "metadata": {"type": "object"}}
    for name in schema.get("required") or ():
        if name not in value:
            yield f"{_join(path, name)} is missing"
    for name, part in value.items():
        below = _join(path, name)
        if name in known:
            yield from _check(known[name], part, below)
        elif isinstance(others, Mapping):
            yield from _check(others, part, below)
        elif not free:
            near = difflib.get_close_matches(name, known, 1)
            yield f"unknown field {below}" + (f"; did you mean {near[0]}?" if near else "")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _resolved(schema: Schema) -> Schema:
    while "$ref" in schema:
        schema = _shared()[schema["$ref"]]
    if "allOf" in schema and len(schema["allOf"]) == 1:
        return _resolved({**schema["allOf"][0], **{key: part for key, part in schema.items() if key != "allOf"}})
    return schema


def _inlined(part: Any) -> Any:
    if isinstance(part, Mapping):
        return {key: _inlined(value) for key, value in (_shared()[part["$ref"]] if "$ref" in part else part).items()}
    return [_inlined(value) for value in part] if isinstance(part, list) else part


@cache
def _shared() -> Mapping[str, Schema]:
    """Parts that several schemas have in common, by their digest."""
    shared: dict[str, Schema] = json.loads(resources.files(__package__).joinpath(FOLDER, SHARED).read_text())
    return shared


@cache
def _schemas() -> Mapping[str, Mapping[str, Schema]]:
    """Schemas by version and kind, older versions first."""
    folder = resources.files(__package__).joinpath(FOLDER)
    names = [path.name for path in folder.iterdir() if path.name.endswith(".json") and path.name != SHARED]
    names.sort(key=_version)
    return {name.removesuffix(".json"): json.loads(folder.joinpath(name).read_text()) for name in names}


def _version(file: str) -> tuple[str, list[int]]:
    kind, _, version = file.removesuffix(".json").rpartition("-")
    return kind, [int(part) for part in version.split(".")]
