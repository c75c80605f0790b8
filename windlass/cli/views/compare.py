"""`windlass compare`: in which settings runs differ, and how their results do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from windlass.api.schemas.runs import Summary
from windlass.api.summary import summarize
from windlass.cli.jobs import json_option, run_names
from windlass.cli.output import count, number, print_json, print_table
from windlass.cli.views.plot import write_plot
from windlass.common.files import real
from windlass.errors import UserError
from windlass.runfolder import RunFolder, steps_of
from windlass.spec.compatibility import leaves, shown
from windlass.ui.library import differing


@click.command(short_help="Compare runs: settings and results.")
@click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=run_names)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw losses: .svg, .png."
)
@json_option
def compare(names: tuple[str, ...], plot: Path | None, as_json: bool) -> None:
    """Compare runs: settings and results.

    Settings are those in which the runs differ. The losses at the last step that all of them have are shown too: there
    a run that trained longer has no advantage. --plot draws the losses over each other; `windlass ui` shows all curves.
    """
    if len(names) < 2:
        raise UserError("give at least two runs", fix="windlass ls    lists them")
    folders = [RunFolder.find(name) for name in names]
    if plot is not None:
        write_plot(folders, plot)
    settings = differing([dict(leaves(folder.load_run().model_dump(mode="json"))) for folder in folders])
    summaries = [summarize(folder) for folder in folders]
    common = min((summary.steps for summary in summaries), default=0)
    at_common = [real(steps_of(folder).get(common, {}).get("loss")) for folder in folders]
    if as_json:
        runs = [
            {"name": folder.name, "settings": {key: values[index] for key, values in settings.items()}}
            | {"summary": summaries[index].model_dump(), "loss_at_common_step": at_common[index]}
            for index, folder in enumerate(folders)
        ]
        print_json({"common_step": common, "runs": runs})
        return
    rows = [
        [key, *("–" if value is None else shown(value).strip("'") for value in values)]
        for key, values in settings.items()
    ]
    rows += [[label, *map(text, summaries)] for label, text in RESULTS.items()]
    if len({summary.steps for summary in summaries}) > 1:
        rows.append([f"loss at step {count(common)}", *map(number, at_common)])
    print_table(["", *(folder.name for folder in folders)], rows)


RESULTS: dict[str, Callable[[Summary], str]] = {
    "steps": lambda summary: count(summary.steps),
    "loss": lambda summary: number(summary.loss),
    "validation loss": lambda summary: number(summary.validation_loss),
    "tokens/s": lambda summary: count(summary.tokens_per_s),
    "restarts": lambda summary: str(summary.restarts),
}
