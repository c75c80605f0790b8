"""`windlass rm`: delete run folders that nobody needs any more."""

from __future__ import annotations

import shutil
from typing import Any

import click

from windlass.api.preparation import is_under_way
from windlass.checkpoint.ownership import alone
from windlass.cli.jobs import quiet_option, run_names
from windlass.cli.output import must_be_asked, plural, print_json
from windlass.errors import UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.targets import target_of_kind
from windlass.targets.launch.supervision import is_running, is_starting
from windlass.targets.protocol import JobRef


@click.command(short_help="Delete runs that have ended.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=run_names)
@click.option("--yes", is_flag=True, help="Do not ask.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
def rm(names: tuple[str, ...], yes: bool, quiet: bool, as_json: bool) -> None:
    """Delete runs that have ended.

    Their folders with checkpoints, logs and exports. A run under way is refused; nothing is deleted if one of several
    is. What a store (checkpoint.store) or a cluster keeps stays there.
    """
    folders = [_removable(name) for name in dict.fromkeys(names)]
    rows = [_described(folder) for folder in folders]
    if not yes:
        must_be_asked(
            f"rm would delete {', '.join(str(folder.path) for folder in folders)}",
            fix=f"windlass rm {' '.join(names)} --yes",
        )
        for row in rows:
            saved = plural(row["checkpoints"], "checkpoint")
            click.echo(f"  {row['folder']}    {saved}, {row['bytes'] / 2**30:.2f} GiB", err=True)
        click.confirm(f"Delete {plural(len(rows), 'run')} for good?", abort=True, err=True)
    for folder in folders:
        _delete(folder)
    if as_json:
        print_json(rows)
    elif not quiet:
        for row in rows:
            stays = f"; its checkpoints in {row['store']} stay" if row["store"] else ""
            click.echo(f"deleted {row['folder']}, {row['bytes'] / 2**30:.2f} GiB{stays}")


def _removable(name: str) -> RunFolder:
    """The folder of a run, by its name alone: a path might lead to a project that has a run.yaml of its own."""
    path = runs_root() / name
    if "/" in name or name in (".", "..") or not (path / "run.yaml").is_file():
        known = sorted(path.parent.name for path in runs_root().glob("*/run.yaml"))
        raise UserError(
            f"there is no run {name!r} under {runs_root()}/",
            evidence=f"runs there: {', '.join(known)}" if known else "no runs there",
            fix="windlass ls",
            error_code="no-such-run",
        )
    if path.is_symlink():
        raise UserError(f"{path} is a link to {path.resolve()}", fix=f"rm {path}    removes the link alone")
    folder = RunFolder(path)
    _must_have_ended(folder)
    return folder


def _must_have_ended(folder: RunFolder) -> None:
    kind = folder.target_kind()
    status = target_of_kind(kind).status(JobRef(kind, folder.name, folder))
    if is_under_way(status) or is_running(folder) or is_starting(folder):
        raise UserError(
            f"the run {folder.name} is under way",
            evidence=f"on the target {kind}: {status.state}" + (f", {status.reason}" if status.reason else ""),
            fix=f"windlass stop {folder.name}    and then rm again",
            error_code="under-way",
        )
    with alone(folder) as nobody_trains:  # ranks that were started without `windlass run` hold their checkpoints alone
        if not nobody_trains:
            raise UserError(
                f"the run {folder.name} is under way",
                evidence=f"a process holds {folder.checkpoints}: ranks train in it, started without `windlass run`",
                fix="end them, and then rm again",
            )


def _described(folder: RunFolder) -> dict[str, Any]:
    try:
        store = folder.load_run().checkpoint.store
    except Exception:  # a damaged run can be deleted too
        store = None
    files = [path for path in folder.path.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        "name": folder.name,
        "folder": str(folder.path),
        "checkpoints": sum(1 for path in files if path.name == "manifest.json"),
        "bytes": sum(path.stat().st_size for path in files),
        "store": store,
    }


def _delete(folder: RunFolder) -> None:
    """Under another name first, so that what is half deleted is not taken for a run."""
    doomed = folder.path.with_name(f".{folder.name}.deleted")
    number = 1
    while doomed.exists():
        number += 1
        doomed = folder.path.with_name(f".{folder.name}.deleted-{number}")
    folder.path.rename(doomed)
    shutil.rmtree(doomed)
