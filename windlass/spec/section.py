"""What every section of the run file is: frozen, and strict about its keys."""

from __future__ import annotations

import typing
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"  # my.module:name
ImportPath = Annotated[str, Field(pattern=IMPORT_PATH)]


class SettingError(ValueError):
    """What keys say that cannot be, with the setting that mends it."""

    def __init__(self, what: str, key: str, value: Any, remark: str = "") -> None:
        super().__init__(what)
        self.key, self.value, self.remark = key, value, remark


class Section(BaseModel):
    """A part of the run file: frozen, unknown keys forbidden, every field described for the reference page."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would read it as 1."""
        if isinstance(value, bool) and info.field_name:
            kinds = list(_kinds(cls.model_fields[info.field_name].annotation))  # constraints among them have no hash
            if (int in kinds or float in kinds) and bool not in kinds:
                raise PydanticKnownError("int_type" if int in kinds else "float_type")
        return value


def _kinds(annotation: Any) -> typing.Iterator[Any]:
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _kinds(inner)
