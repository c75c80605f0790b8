"""The `checkpoint` section of the run file."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from windlass.spec.section import Section, SettingError


class CheckpointSection(Section):
    """When state is saved, and what is kept."""

    every: PositiveInt = 500
    """Steps between checkpoints in the run folder; one more at the end and on SIGTERM."""
    memory_every: PositiveInt | None = None
    """Steps between copies of the state in the nodes' own memory, each also in a peer node's: they survive the death of
    any process and of one node. Only for the same number of ranks and the same sharding."""
    memory_path: str = "/dev/shm/windlass-$UID"
    """Where on a node that memory is; $VARIABLES are filled in there, $UID is the user's number. Nobody else may write
    there."""
    local_every: PositiveInt | None = None
    """Steps between copies on the nodes' own disks; they survive a restart of the nodes. Needs `local_path`."""
    local_path: str | None = None
    """A folder on every node's own disk, such as /mnt/nvme; $VARIABLES are filled in there."""
    managed_every: PositiveInt | None = None
    """Steps between copies in HyperPod's Managed Tiered Checkpointing; needs a cluster that has it enabled."""
    managed_endpoint: str | None = None
    """Address of its service. Default: the one of the cluster."""
    store: str | None = None
    """`s3://bucket/prefix`, or another folder: every checkpoint of the run folder goes there too, beside training.
    A run whose folder is gone goes on from there."""
    direct: bool | None = None
    """Every rank streams its part of a checkpoint straight into `store`, and nothing is kept in the run folder: no disk
    and no folder that nodes share is needed. Default: for pods that share no folder."""
    store_keep: PositiveInt | None = None
    """Newest complete checkpoints to keep in the store. Default: `keep`."""
    upload_seconds: PositiveInt = 600
    """Longest that a request to the store is tried again before the upload counts as failed."""
    keep: PositiveInt = 3
    """Newest complete checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this, for ever."""
    keep_best: bool = False
    """Also save after a validation that is the best so far, and keep that checkpoint until a better one is saved;
    `export` then writes it instead of the last."""
    at_end: bool = True
    """Save after the last step too. On SIGTERM a run saves whatever this is."""
    background: bool = True
    """Write while training goes on; only the copy to host memory stalls it."""
    resume: bool = True
    """Start from the newest complete checkpoint of the run folder."""
    branch_from: str | None = None
    """`RUN@STEP`: a new run begins with that checkpoint of another run beside it: weights, optimizer and step.
    `windlass run --from RUN[@STEP]` sets it. With the same data it goes on there, with other data at its beginning."""
    grace_seconds: PositiveInt = 120
    """Time between SIGTERM and SIGKILL; a save must fit in."""
    export: bool | Literal["merged"] = False
    """Write `export/`, a Hugging Face folder, when the run is finished: the model, or the adapter of a LoRA run;
    `merged`: the whole model with the adapter merged into it."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in `export/`; float32 keeps the master weights exactly."""

    @model_validator(mode="after")
    def keys_fit_together(self) -> Self:
        if self.export and not self.at_end:
            raise SettingError(
                "checkpoint.export needs the last step's checkpoint, but checkpoint.at_end is false",
                "checkpoint.at_end",
                True,
            )
        if self.direct and self.store is None:
            raise SettingError("checkpoint.direct needs a checkpoint.store", "checkpoint.store", "s3://BUCKET/PREFIX")
        if (self.local_every is None) != (self.local_path is None):
            missing, value = ("local_every", 100) if self.local_every is None else ("local_path", "/local/FOLDER")
            raise SettingError(
                "checkpoint.local_every and checkpoint.local_path need each other", f"checkpoint.{missing}", value
            )
        return self

    @model_validator(mode="after")
    def places_are_well_formed(self) -> Self:
        name, mark, step = (self.branch_from or "").rpartition("@")
        is_step = bool(mark) and step.isdecimal() and name not in ("", ".", "..") and "/" not in name
        if self.branch_from and not is_step:
            raise ValueError(f"checkpoint.branch_from is RUN@STEP, such as base@200, not {self.branch_from!r}")
        scheme, separator, _ = (self.store or "").partition("://")
        if separator and scheme not in ("s3", "file"):
            raise ValueError(f"checkpoint.store cannot be {scheme}://: give s3://BUCKET/PREFIX or the path of a folder")
        return self
