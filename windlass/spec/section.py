"""What every section of the run file is: frozen, and strict about its keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"  # my.module:name
ImportPath = Annotated[str, Field(pattern=IMPORT_PATH)]


class Section(BaseModel):
    """A part of the run file: frozen, unknown keys forbidden, every field described for the reference page."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
