"""The `checkpoint` section of the run file."""

from __future__ import annotations

from typing import Self

from pydantic import PositiveInt, model_validator

from windlass.spec.section import Section


class CheckpointSection(Section):
    """When state is saved, and what is kept."""

    every: PositiveInt = 500
    """Steps between checkpoints; one more at the end and on SIGTERM."""
    keep: PositiveInt = 3
    """Newest complete checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this, for ever."""
    at_end: bool = True
    """Save after the last step too. On SIGTERM a run saves whatever this is."""
    background: bool = True
    """Write while training goes on; only the copy to host memory stalls it."""
    resume: bool = True
    """Start from the newest complete checkpoint of the run folder."""
    grace_seconds: PositiveInt = 120
    """Time between SIGTERM and SIGKILL; a save must fit in."""
    export: bool = False
    """Write `export/`, a Hugging Face folder, when the run is finished."""

    @model_validator(mode="after")
    def export_needs_the_end(self) -> Self:
        if self.export and not self.at_end:
            raise ValueError("checkpoint.export needs the last step's checkpoint, but checkpoint.at_end is false")
        return self
