"""Evaluate a trained model on tasks of EleutherAI's lm-evaluation-harness, the extra `eval`."""

from __future__ import annotations

import difflib
import logging
import math
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from windlass.common.hub import chain, first_line
from windlass.errors import ExitCode, UserError
from windlass.trainer.results.generation import Speaker

NO_METRICS = frozenset(("alias", "name", "sample_len", "sample_count"))


def load_tasks(names: Sequence[str], include_paths: Sequence[str]) -> list[Any]:
    """Tasks by name, group or pattern, with their data. UserError for those that cannot be had: before a model is."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # The harness's own tasks are thousands of files, which take seconds to read: only where they are needed.
    manager = TaskManager(include_path=list(include_paths), include_defaults=False)
    if any(not manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=list(include_paths))
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        near = [task for name in unknown for task in difflib.get_close_matches(name, manager.all_tasks, 1)]
        raise UserError(
            f"the harness has no task {', '.join(unknown)}",
            evidence=f"lm-eval {version('lm_eval')} has {len(manager.all_tasks):,} tasks and groups",
            fix=f"--tasks {','.join(near)}" if near else "--include-path FOLDER    with tasks of your own",
        )
    tasks: list[Any] = []
    for name in dict.fromkeys(match for pattern in names for match in manager.match_tasks([pattern])):
        try:
            loaded = manager.load([name])
        except Exception as error:  # of the harness, of `datasets`, of the Hub's client, or of the task's own code
            raise _cannot_load(name, error) from None
        tasks += [loaded["groups"][name]] if name in loaded["groups"] else loaded["tasks"].values()
    return tasks


def _cannot_load(task: str, error: Exception) -> UserError:
    evidence = f"{type(error).__name__}: {first_line(error)}"
    if any(isinstance(link, ConnectionError) for link in chain(error)):  # OfflineModeIsEnabled is one too
        return UserError(
            f"the data of the task {task} cannot be fetched",
            evidence=evidence,
            cause="the Hub cannot be reached from here, and this machine's cache has no copy",
            fix="the same command where the Hub can be reached, with a shared HF_HOME; or HTTPS_PROXY, HF_ENDPOINT",
            exit_code=ExitCode.FAILED,
        )
    return UserError(f"the task {task} cannot be loaded", evidence=evidence)


def evaluate(
    speaker: Speaker, tasks: list[Any], *, shots: int | None, limit: int | None, batch_size: int, chat: bool
) -> dict[str, Any]:
    """One row per task or group and metric, and how they were measured."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    begin = time.perf_counter()
    try:
        measured = simple_evaluate(
            model=HFLM(pretrained=speaker.model, tokenizer=speaker.tokenizer, batch_size=batch_size),
            tasks=tasks,
            num_fewshot=shots,
            limit=limit,
            apply_chat_template=chat,
            log_samples=False,
        )
    except ValueError as error:  # tasks that run code, too few examples for the shots, no chat template
        raise UserError("the harness refuses the evaluation", evidence=first_line(error)) from None
    return {
        "time": round(time.time(), 3),
        "seconds": round(time.perf_counter() - begin, 3),
        "harness": f"lm-eval {version('lm_eval')}",
        "dtype": str(speaker.model.dtype).removeprefix("torch."),
        "limit": limit,
        "results": rows_of(measured),
    }


def rows_of(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the harness's results, where `acc,none` and `acc_stderr,none` are a metric, its filter, and its error."""
    rows = []
    for task, values in measured["results"].items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if key in NO_METRICS or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            counted = measured.get("n-samples", {}).get(task, {})
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": None if filtered in ("", "none") else filtered,
                    "value": _finite(value),
                    "stderr": _finite(values.get(f"{metric}_stderr,{filtered}")),
                    "higher_is_better": measured.get("higher_is_better", {}).get(task, {}).get(metric),
                    "shots": measured.get("n-shot", {}).get(task),
                    "samples": counted.get("effective", values.get("sample_len")),
                }
            )
    return rows


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
