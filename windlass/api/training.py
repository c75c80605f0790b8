"""`windlass.train`: a run in this process, with code of the caller's own; inside torchrun, or alone in a notebook."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from windlass.api.schemas.runs import RunResult
from windlass.api.submission import result_of
from windlass.common import own_code
from windlass.common.files import append_json_line
from windlass.common.locks import locked
from windlass.errors import ExitCode, UserError
from windlass.plan import check, resolve
from windlass.runfolder import RunFolder
from windlass.spec import Run, parse_run
from windlass.spec.compatibility import adopt, must_match
from windlass.spec.loading import run_of
from windlass.targets.launch.supervision import LOCK_FILE, SUPERVISOR_FILE, is_running, supervisor_of
from windlass.targets.local.client import already_running
from windlass.targets.local.state import end_of_former
from windlass.targets.protocol import JobStatus, State


def train(
    run: Run | str | os.PathLike[str],
    *,
    model: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    data: Any = None,
    callbacks: Sequence[type[Any]] = (),
    optimizer: Callable[..., Any] | None = None,
) -> RunResult:
    """Train a run, or that of a run file, here in this process to its end. Under torchrun every rank calls this alike.

    What is given stands for the same key of the run file: `model` is a class (model.class), `loss` a function
    (train.loss), `data` a dataset or what makes one (data.source), `callbacks` are classes (train.callbacks) and
    `optimizer` makes one (train.optimizer); docs/extending.md says what each must do. A run folder that has a
    checkpoint goes on from it, with the same settings. Nothing restarts ranks that die; `submit` does.
    """
    run = _with(run_of(run), model=model, loss=loss, data=data, callbacks=callbacks, optimizer=optimizer)
    if not run.name:
        raise UserError("the run has no name", fix='run.model_copy(update={"name": "small"})')
    try:
        from windlass.trainer.distributed.ranks import local_world_size
        from windlass.trainer.main import train_here
    except ModuleNotFoundError as error:
        raise UserError(
            f"training needs {error.name}, which is not installed", fix="pip install 'windlass[train]'"
        ) from None
    own_code.use_folder(run.code)
    folder = RunFolder.of(run)
    if is_running(folder):
        raise already_running(folder)
    before = folder.load_run() if folder.run_file.is_file() and folder.has_checkpoints() else None
    run = resolve(adopt(run, before) if before else run)
    check(run, int(os.environ.get("WORLD_SIZE", "1")), local_world_size())
    if before:
        must_match(before, run, folder=str(folder.path))
    with _locked(folder):
        code, step = train_here(folder, run)
    states: dict[ExitCode, State] = {ExitCode.OK: "finished", ExitCode.PREEMPTED: "preempted"}
    status = JobStatus(states.get(code, "failed"), step=step, steps=run.train.steps, exit_code=int(code))
    return result_of(folder, status)


@contextlib.contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    """The folder's lock, as a supervisor has it; under torchrun the first rank holds it for all."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    with locked(folder.path / LOCK_FILE, patience_s=0) as is_ours:
        if not is_ours:
            raise already_running(folder)
        _take_over(folder)
        yield


def _take_over(folder: RunFolder) -> None:
    """A supervisor that the run once had is over: its end is written down, and nobody asks for it any more."""
    if end := end_of_former(folder, supervisor_of(folder)):
        append_json_line(folder.history, end)
    (folder.path / SUPERVISOR_FILE).unlink(missing_ok=True)


def _with(run: Run, *, data: Any, callbacks: Sequence[type[Any]], **named: Any) -> Run:
    """The run with import paths of the given objects in the place of its own."""
    if named["model"] is not None and not isinstance(named["model"], type) and hasattr(named["model"], "parameters"):
        raise UserError(
            f"model is an instance of {type(named['model']).__name__}, and its class is wanted",
            cause="every rank makes the model itself: weights then depend on no number of ranks, and a resume is exact",
            fix="model=its class, with the arguments of its constructor in model.config; to begin with its weights: "
            "save_pretrained(FOLDER), then model.path=FOLDER model.init=pretrained",
        )
    values = run.model_dump(mode="json", exclude_unset=True)
    keys = {"model": ("model", "class"), "loss": ("train", "loss"), "optimizer": ("train", "optimizer")}
    for name, thing in named.items():
        if thing is not None:
            section, key = keys[name]
            values.setdefault(section, {})[key] = own_code.path_of(thing, f"{section}.{key}")
    if named["model"] is not None:
        for key in ("preset", "path"):
            values["model"].pop(key, None)
    if data is not None:
        values["data"]["source"] = f"python:{own_code.path_of(data, 'data.source')}"
        values["data"].pop("sources", None)
    if callbacks:
        paths = [own_code.path_of(callback, f"train.callbacks.{number}") for number, callback in enumerate(callbacks)]
        values.setdefault("train", {})["callbacks"] = [*run.train.callbacks, *paths]
    return parse_run(values, source="windlass.train")
