"""`windlass eval`: a trained model on the tasks of lm-evaluation-harness, with the results kept in the run folder."""

from __future__ import annotations

from pathlib import Path

import click

from windlass.api.summary import evaluated_tasks
from windlass.cli.jobs import json_option, run_names
from windlass.cli.output import print_json
from windlass.cli.runs.summary import print_evaluations
from windlass.common.files import append_json_line
from windlass.errors import UserError
from windlass.runfolder import RunFolder

FOLDER = click.Path(exists=True, file_okay=False)


@click.command("eval", short_help="Evaluate a run's model on benchmark tasks.")
@click.argument("name", metavar="RUN|FOLDER", shell_complete=run_names)
@click.option(
    "--tasks", required=True, metavar="TASK,…", help="Of lm-evaluation-harness: names, groups or patterns, with commas."
)
@click.option("--include-path", "include_paths", multiple=True, type=FOLDER, help="Folders with tasks, as YAML files.")
@click.option("--shots", type=click.IntRange(min=0), help="Examples before each question. Default: the task's own.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The first N examples of every task alone.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Requests at once.")
@click.option("--step", type=int, metavar="N", help="Of this checkpoint. Default: the newest complete one.")
@click.option("--chat", is_flag=True, help="Put requests through the tokenizer's chat template.")
@json_option
def evaluate(
    name: str,
    tasks: str,
    include_paths: tuple[str, ...],
    shots: int | None,
    limit: int | None,
    batch_size: int,
    step: int | None,
    chat: bool,
    as_json: bool,
) -> None:
    """Evaluate a run's model on benchmark tasks.

    The tasks are those of EleutherAI's lm-evaluation-harness (the extra `eval`), or your own. Of a run the newest
    complete checkpoint is read, an adapter merged into its model; of a FOLDER what `ckpt export` wrote, or any Hugging
    Face model. Results are added to evaluations.jsonl of the run folder: `show` and `report` list them, and the next
    `ckpt export` of that step names them in the model card. On a GPU where there is one.
    """
    names = [task for task in tasks.split(",") if task]
    if not names:
        raise UserError("--tasks names none", fix="--tasks hellaswag,arc_easy")
    import lm_eval  # noqa: F401  # where it is missing, that is said first

    from windlass.trainer.export import exported_to
    from windlass.trainer.results.evaluation import evaluate as evaluate_model
    from windlass.trainer.results.evaluation import load_tasks
    from windlass.trainer.results.generation import is_model_folder, speaker_of

    is_folder = is_model_folder(name)
    run_folder = _run_of(Path(name)) if is_folder else RunFolder.find(name)
    loaded = load_tasks(names, include_paths)
    speaker = speaker_of(name, step)
    measured = evaluate_model(speaker, loaded, shots=shots, limit=limit, batch_size=batch_size, chat=chat)
    result = {"name": name, "step": speaker.step, **measured}
    if run_folder is not None:
        exported = exported_to(run_folder, Path(name)) if is_folder else None
        result["step"] = exported.step if exported else speaker.step
        append_json_line(run_folder.evaluations, result)
    if as_json:
        print_json({**result, "path": str(run_folder.evaluations) if run_folder else None})
        return
    print_evaluations(evaluated_tasks([result]))
    if run_folder is not None:
        click.echo(f"kept in {run_folder.evaluations}")


def _run_of(export: Path) -> RunFolder | None:
    """The run in whose folder an export lies."""
    folder = RunFolder(export.absolute().parent)
    return folder if folder.run_file.is_file() else None
