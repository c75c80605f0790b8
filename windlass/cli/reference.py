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
    own = [_key(None, name, field) for name, field in Run.model_fields.items() if _section_model(field) is None]
    yield SectionReference(None, "", required=False, keys=tuple(own))
    for name, field in Run.model_fields.items():
        model = _section_model(field)
        if model is not None:
            keys = tuple(_key(name, key, below) for key, below in model.model_fields.items())
            yield SectionReference(name, inspect.getdoc(model) or "", required=field.is_required(), keys=keys)


def options_of_targets() -> Iterator[SectionReference]:
    """The sections within sections, such as target.slurm and model.lora."""
    for name, field in Run.model_fields.items():
        model = _section_model(field)
        for below, inner in model.model_fields.items() if model else ():
            options = _section_model(inner) or _optional_section(inner)
            if options is not None:
                path = f"{name}.{below}"
                keys = tuple(_key(path, key, option) for key, option in options.model_fields.items())
                yield SectionReference(path, inspect.getdoc(options) or "", required=False, keys=keys)


def keys() -> Iterator[Key]:
    for section in sections():
        yield from section.keys


def _key(section: str | None, name: str, field: FieldInfo) -> Key:
    default = None if field.default is PydanticUndefined else field.default
    if isinstance(default, BaseModel):
        default = default.model_dump(exclude_defaults=True)
    description = " ".join((field.description or "").split())
    return Key(section, name, _kind(field.annotation), default, field.is_required(), description)


def _section_model(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _optional_section(field: FieldInfo) -> type[BaseModel] | None:
    """The section of a key that may be left out altogether."""
    kinds = typing.get_args(field.annotation)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


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
