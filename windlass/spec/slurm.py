"""What a run file says to Slurm."""

from __future__ import annotations

import re
from typing import Any, Self

from pydantic import field_validator, model_validator

from windlass.spec.section import Section

SLURM_TIME = re.compile(
    r"[0-9]{1,9}(min|h|d)|[0-9]{1,9}(:[0-9]{1,2}){1,2}|[0-9]{1,9}-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE"
)


class SlurmOptions(Section):
    """What Slurm is asked for, beside nodes and GPUs."""

    partition: str | None = None
    """Partition. Default: the cluster's own default."""
    account: str | None = None
    """Account that pays."""
    qos: str | None = None
    """Quality of service."""
    time: str | None = None
    """Time limit of one stay on the nodes: `90min`, `4h`, `2d`, or as Slurm writes it, in quotes: `"1-12:00:00"`. A run
    that needs longer is saved before the limit and goes on by itself. Default: the partition's."""
    constraint: str | None = None
    """Features the nodes must have."""
    exclusive: bool = False
    """Share the nodes with nobody: all their cores and memory."""
    gres: str | None = None
    """Generic resources per node where the cluster wants them by name, `gpu:h100:8` say, not a number of GPUs."""
    memory: str | None = None
    """Memory per node, `200G` say. Default: the cluster's; all of it with `exclusive`."""
    job_name: str | None = None
    """Name of the job in Slurm's lists. Default: the run's name."""
    requeue: bool = True
    """Go back to the queue and on from the last checkpoint after preemption, the time limit and lost nodes."""
    environment: str | None = None
    """Python environment with windlass in it, a folder that every node sees. Default: the one `windlass` runs in."""
    setup: tuple[str, ...] = ()
    """Shell lines that the job runs first, such as `module load cuda`."""
    container: str | None = None
    """Image in which the ranks run, through Pyxis and enroot: `nvcr.io#nvidia/pytorch:…` or a `.sqsh` file."""
    container_mounts: tuple[str, ...] = ()
    """Folders to mount into the container, `/data:/data` say; the run folder always is."""
    sbatch: tuple[str, ...] = ()
    """Further sbatch options as they are, `--reservation=maintenance` say."""

    @field_validator("time", mode="before")
    @classmethod
    def time_is_text(cls, value: Any) -> Any:
        if isinstance(value, int):  # YAML reads 4:00:00 as a number to the base of 60, which nobody means
            raise ValueError("target.slurm.time needs a unit, 90min or 4h, or quotes inside it: '\"4:00:00\"'")
        return value

    @model_validator(mode="after")
    def one_line_each(self) -> Self:
        if self.time is not None and not SLURM_TIME.fullmatch(self.time):
            raise ValueError(
                f"target.slurm.time {self.time!r} is no time limit; for example 90min, 4h, 2d, '1-12:00:00'"
            )
        for name, value in self:
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and any(ord(letter) < 32 for letter in text):
                    raise ValueError(f"target.slurm.{name} holds a line break or another control character")
        wrong = [line for line in self.sbatch if not line.startswith("-")]
        if wrong:
            raise ValueError(f"target.slurm.sbatch takes sbatch options, and {wrong[0]!r} does not begin with a dash")
        return self
