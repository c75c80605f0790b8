"""The keys of the run file with their defaults and descriptions, read from the models: nothing here can drift."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from windlass.spec import Run
from windlass.spec.loading import model_of


@dataclass(frozen=True)
class Key:
    section: str | None
    name: str
    kind: str
    default: Any
    required: bool
    description: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name


@dataclass(frozen=True)
class SectionReference:
    name: str | None  # None: keys of the run file itself
    description: str
    required: bool
    keys: tuple[Key, ...]


def sections() -> Iterator[SectionReference]:
    """The keys of the run file itself, then section by section."""
    own = [_key(None, name, field) for name, field in Run.model_fields.items() if not model_of(field.annotation)]
    yield SectionReference(None, "", required=False, keys=tuple(own))
    yield from _sections_of(Run)


def options_of_targets() -> Iterator[SectionReference]:
    """The sections within sections, such as target.slurm and model.lora."""
    for name, field in Run.model_fields.items():
        model = model_of(field.annotation)
        if model is not None:
            yield from _sections_of(model, f"{name}.")


def _sections_of(model: type[BaseModel], prefix: str = "") -> Iterator[SectionReference]:
    for name, field in model.model_fields.items():
        section = model_of(field.annotation)
        if section is not None:
            keys = tuple(_key(f"{prefix}{name}", key, below) for key, below in section.model_fields.items())
            yield SectionReference(f"{prefix}{name}", inspect.getdoc(section) or "", field.is_required(), keys)


def _key(section: str | None, name: str, field: FieldInfo) -> Key:
    default = None if field.default is PydanticUndefined else field.default
    if isinstance(default, BaseModel):
        default = default.model_dump(exclude_defaults=True)
    description = " ".join((field.description or "").split())
    return Key(section, name, _kind(field.annotation), default, field.is_required(), description)


def _kind(annotation: Any) -> str:
    """A type in a user's words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(str(word) for word in arguments)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_kind(kind) for kind in arguments if kind is not type(None))
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true | false"}.get(
        getattr(annotation, "__name__", ""), str(annotation)
    )
