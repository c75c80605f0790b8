"""Read a run file and its overrides into a `Run`; a mistake becomes one UserError with the nearest valid key."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from windlass.errors import UserError
from windlass.spec.run import Run

Values = dict[str, Any]


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a file and `section.key=value` overrides describe."""
    path = Path(path)
    values = read_yaml(path)
    for override in overrides:
        apply_override(values, override)
    values.setdefault("name", "")
    if not values["name"]:
        values["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "run"
    return parse_run(values, source=str(path))


def read_yaml(path: Path) -> Values:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], 1)
        raise UserError(
            f"there is no run file {path}",
            fix=f"windlass run {path.parent / near[0]}" if near else f"windlass init {path}",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the run file {path} cannot be read", evidence=str(error)) from None
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML", evidence=str(error)) from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no run: a mapping with the sections model and data is expected")
    return values


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats: plain SafeLoader reads `3e-4` as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"(?:[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)|[-+]?[0-9]+\.[0-9_]*|[-+]?\.[0-9]+)$"),
    list("-+0123456789."),
)


def apply_override(values: Values, override: str) -> None:
    """Set one `a.b=value` in `values`; `b=value` too where only one section has a `b`."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"the override {override!r} is not of the form section.key=value", fix="train.steps=200")
    parts = _full_path(key.strip())
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"the value in the override {override!r} is not valid YAML", evidence=str(error)) from None
    here = values
    for part in parts[:-1]:
        below = here.setdefault(part, {})
        if below is None:
            below = here[part] = {}
        if not isinstance(below, dict):
            raise UserError(f"the override {override!r} goes below {part!r}, which is the value {below!r}")
        here = below
    here[parts[-1]] = value


def _full_path(key: str) -> list[str]:
    parts = key.split(".")
    if len(parts) > 1 or key in Run.model_fields:
        return parts
    sections = [name for name, section in _sections() if key in section.model_fields]
    if len(sections) == 1:
        return [sections[0], key]
    if sections:
        choices = ", ".join(f"{section}.{key}" for section in sections)
        raise UserError(f"the override {key!r} could mean {choices}", fix=f"{sections[0]}.{key}=…")
    raise UserError(_unknown(key, _all_keys()), fix="windlass schema    lists every key")


def parse_run(values: Mapping[str, Any], *, source: str = "the run") -> Run:
    values = {key: {} if value is None and key in dict(_sections()) else value for key, value in values.items()}
    try:
        return Run.model_validate(values)
    except ValidationError as error:
        problems = [_problem(one) for one in error.errors()]
        raise UserError(
            f"{source}: {problems[0]}" if len(problems) == 1 else f"{source} has {len(problems)} mistakes",
            evidence="\n".join(problems) if len(problems) > 1 else None,
        ) from None


def _problem(error: Any) -> str:
    """One pydantic error in a user's words."""
    place = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            siblings = [".".join([*map(str, error["loc"][:-1]), key]) for key in _keys_at(error["loc"][:-1])]
            return _unknown(place, [*siblings, *_all_keys()])
        case "missing":
            return f"{place} is missing"
        case "value_error":
            return str(error["ctx"]["error"])
        case _:
            message = error["msg"][0].lower() + error["msg"][1:]
            return f"{place}: {message}, not {error['input']!r}"


def _unknown(key: str, known: Sequence[str]) -> str:
    leaf = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, known, 1, cutoff=0.7)
    if not near:  # the right leaf in the wrong section, or a leaf misspelt
        by_leaf = {one.rsplit(".", 1)[-1]: one for one in reversed(known)}
        near = [by_leaf[one] for one in difflib.get_close_matches(leaf, list(by_leaf), 1, cutoff=0.6)]
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown key {key}{hint}"


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in Run.model_fields.items():
        kind = _model_of(field.annotation)
        if kind:
            yield name, kind


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple):
        return next((kind for arg in typing.get_args(annotation) if (kind := _model_of(arg))), None)
    return None


def _keys_at(place: Sequence[Any]) -> list[str]:
    model: type[BaseModel] | None = Run
    for part in place:
        if isinstance(part, int):  # one of several alike
            continue
        field = model.model_fields.get(str(part)) if model else None
        model = _model_of(field.annotation) if field else None
    return list(model.model_fields) if model else []


def _all_keys() -> list[str]:
    leaves = [f"{name}.{key}" for name, section in _sections() for key in section.model_fields]
    return [*Run.model_fields, *leaves]


def dump_run(run: Run) -> str:
    """The run as YAML that `load_run` reads back to the same run."""
    return yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
