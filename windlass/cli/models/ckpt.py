"""`windlass ckpt`: the checkpoints of a run in all its tiers, listed, proven, fetched, deleted, exported."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windlass.api import publishing
from windlass.checkpoint import TIERS
from windlass.checkpoint.browsing import views
from windlass.checkpoint.pruning import best_step, clear_leftovers, expired_rows
from windlass.cli.clusters.pods import fetch_from_cluster, rows_in_cluster
from windlass.cli.jobs import json_option
from windlass.cli.output import count, must_be_asked, number, print_json, print_table
from windlass.common.files import read_json_lines, real, whole
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder

if TYPE_CHECKING:
    from windlass.api.publishing import Repository
    from windlass.spec import Run


@click.group()
def ckpt() -> None:
    """List, verify, fetch and export checkpoints."""


tier_option = click.option(
    "--tier",
    type=click.Choice([*TIERS, "cluster"]),
    help="One tier only. Default: all. `cluster`: the run folder that a Kubernetes run's pods have.",
)


@ckpt.command("ls")
@click.argument("name")
@tier_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_checkpoints(name: str, tier: str | None, as_json: bool) -> None:
    """Checkpoints of a run in its tiers: step, size, age, and whether they are complete.

    Of memory and local disks those of this node are shown.
    """
    shown = views(RunFolder.find(name), tier) if tier != "cluster" else []
    rows = [row.as_dict() for view in shown for row in view.rows()]
    rows += rows_in_cluster(name, tier)
    losses = _validation_losses(RunFolder.find(name)) if shown else {}
    best = min(losses, key=lambda step: losses[step]) if losses else None
    rows = [{**row, "validation_loss": losses.get(row["step"]), "best": row["step"] == best} for row in rows]
    if as_json:
        print_json(rows)
    elif rows:
        _print_checkpoints(rows)
    else:
        click.echo(f"no checkpoints in {name}")


def _print_checkpoints(rows: list[dict[str, Any]]) -> None:
    tiers = len({row["tier"] for row in rows}) > 1
    validated = any(row["validation_loss"] is not None for row in rows)
    cells = []
    for row in rows:
        state = "complete" if row["complete"] else "incomplete (never taken for a resume)"
        age = f"{_duration(time.time() - row['created'])} ago" if row["created"] else "–"
        line = [row["tier"]] if tiers else []
        line += [str(row["step"]), f"{row['bytes'] / 2**20:,.1f} MiB", state, age, count(row["tokens"])]
        if validated:
            line.append(number(row["validation_loss"]) + (" best" if row["best"] else ""))
        cells.append(line)
    columns = ["STEP", "SIZE", "STATE", "AGE", "TOKENS"]
    print_table([*(["TIER"] if tiers else []), *columns, *(["VALIDATION LOSS"] if validated else [])], cells)


def _validation_losses(folder: RunFolder) -> dict[int, float]:
    """The validation loss at each step that has one; of a validation that was repeated the last."""
    records = (record for record in read_json_lines(folder.metrics) if record.get("kind") == "validation")
    losses = ((whole(record.get("step")), real(record.get("loss"))) for record in records)
    return {step: loss for step, loss in losses if step is not None and loss is not None}


@ckpt.command()
@click.argument("name")
@click.option("--step", type=int, help="One step only. Default: all.")
@tier_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def verify(name: str, step: int | None, tier: str | None, as_json: bool) -> None:
    """Read every file and compare it with its manifest; exit code 1 if anything is damaged.

    Of memory and local disks the pieces on this node are read.
    """
    shown = views(RunFolder.find(name), tier)
    rows: list[dict[str, Any]] = []
    for view in shown:
        for stored in view.rows():
            if step is None or (stored.step == step and stored.complete):
                damages = (
                    [{"file": d.file, "reason": d.reason} for d in view.damages(stored.step)] if stored.complete else []
                )
                removed = bool(damages) and not view.has(stored.step)  # by a run that saves and lets older ones go
                state = {"tier": stored.tier, "step": stored.step, "complete": stored.complete, "removed": removed}
                rows.append({**state, "damages": [] if removed else damages})
    if step is not None and not rows:
        raise UserError(f"no complete checkpoint of step {step} in {name}", fix=f"windlass ckpt ls {name}")
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            where = f"{row['tier']:<8}" if len(shown) > 1 else ""
            word = "whole" if row["complete"] else "incomplete: a save was cut off; it is never resumed from"
            word = "removed meanwhile" if row["removed"] else word
            click.echo(f"{where}step {row['step']:>8}  {word if not row['damages'] else 'DAMAGED'}")
            for item in row["damages"]:
                click.echo(f"{'':>15}{item['file']}: {item['reason']}")
    if any(row["damages"] for row in rows):
        raise SystemExit(int(ExitCode.FAILED))


@ckpt.command()
@click.argument("name")
@click.option("--step", type=int, help="Default: the newest complete one.")
@tier_option
@click.option("--to", type=click.Path(path_type=Path), help="A folder. Default: checkpoints/ of the run folder.")
@json_option
def get(name: str, step: int | None, tier: str | None, to: Path | None, as_json: bool) -> None:
    """Bring a checkpoint of any tier into a folder, proven, in the form that any number of ranks can read."""
    from windlass.trainer.checkpointing.materialize import obtain

    checkpoint = fetch_from_cluster(name, step, tier, to) or obtain(RunFolder.find(name), step, tier=tier, to=to)
    if as_json:
        print_json({"step": checkpoint.step, "path": str(checkpoint.path)})
    else:
        click.echo(f"step {checkpoint.step} → {checkpoint.path}")


@ckpt.command()
@click.argument("name")
@tier_option
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    help="Newest complete ones to keep. Default: as the run says. 0 empties one --tier whose newest is elsewhere too.",
)
@click.option("--keep-every", type=click.IntRange(min=1), help="Also keep multiples of this. Default: as the run says.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def prune(
    name: str, tier: str | None, keep: int | None, keep_every: int | None, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Delete older checkpoints, and what saves and uploads that were cut off left behind (in a store: after a day)."""
    folder = RunFolder.find(name)
    going = expired_rows(folder, tier, keep=keep, keep_every=keep_every)
    rows = [row.as_dict() for _, row in going]
    if not as_json:
        for row in rows:
            click.echo(f"{row['tier']:<8}step {row['step']:>8}  {row['bytes'] / 2**20:>10.1f} MiB  {row['path']}")
    leftovers = 0
    if not dry_run:
        if going and not yes:
            must_be_asked(f"prune would delete {len(going)} checkpoints", fix="--yes", as_json=as_json)
            click.confirm(f"delete these {len(going)}?", abort=True, err=True)
        for view, expired in going:
            view.delete(expired.step)

        leftovers = clear_leftovers(folder, tier)
    if as_json:
        print_json({"deleted": [] if dry_run else rows, "expired": rows, "leftovers": leftovers})
    else:
        outcome = "would be deleted" if dry_run else "deleted"
        click.echo(f"{len(going)} {outcome}" + (f", {leftovers} leftovers cleared" if leftovers else ""))


@ckpt.command()
@click.argument("name")
@click.option("--step", type=int, help="Default: the newest complete one.")
@click.option("--to", "destination", type=click.Path(path_type=Path), help="Default: export/ in the run folder.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the written weights; float32 keeps the master weights exactly. Default: checkpoint.export_dtype.",
)
@click.option("--best", is_flag=True, help="The checkpoint with the best validation loss instead of the newest.")
@click.option("--merge", is_flag=True, help="Of a LoRA run: write the whole model with the adapter merged into it.")
@click.option("--license", metavar="ID", help="For the model card: apache-2.0, llama3.2, … Default: unknown.")
@click.option("--force", is_flag=True, help="Replace a folder that is there.")
@click.option("--push", metavar="OWNER/NAME", help="Then push it to this repository of the Hub, made if need be.")
@click.option("--private", is_flag=True, help="With --push: a new repository is private; a public one is refused.")
@click.option("--revision", metavar="BRANCH", help="With --push: onto this branch, made if need be. Default: main.")
@click.option("--dry-run", is_flag=True, help="With --push: check that it may be written to; export and send nothing.")
@json_option
def export(
    name: str,
    step: int | None,
    destination: Path | None,
    dtype: str | None,
    best: bool,
    merge: bool,
    license: str | None,
    force: bool,
    push: str | None,
    private: bool,
    revision: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write a Hugging Face folder: a model that transformers loads, or the adapter of a LoRA run that `peft` loads.

    Its README.md is a model card, filled from the run. --push sends the folder to the Hub in one commit, with the token
    of `hf auth login` or HF_TOKEN; whether that token may write there is checked before anything is exported. Repeated
    after an interruption, it sends what is missing.
    """
    folder = RunFolder.find(name)
    target = destination or folder.export
    if best and step is not None:
        raise UserError("--best and --step choose different checkpoints", fix="one of them")
    if not push and (private or revision or dry_run):
        raise UserError("--private, --revision and --dry-run go with --push", fix="--push OWNER/NAME")
    occupied = UserError(f"{target} exists", fix="the same command with --force, or with --to FOLDER")
    if target.exists() and not force and not push:
        raise occupied

    repository = publishing.Repository(push, revision, private) if push else None
    exists = publishing.check_repository(repository) if repository else False
    from windlass.trainer.export import export_checkpoint, exported_to, kind_of, reading
    from windlass.trainer.results.model_card import write_card

    run = folder.load_run()
    kind, dtype = kind_of(run, merge=merge), dtype or run.checkpoint.export_dtype
    step = best_step(folder) if best else step
    done = None
    if repository:
        _must_load_elsewhere(run, kind)
        with reading(folder, step) as checkpoint:
            manifest = checkpoint.manifest
        earlier = exported_to(folder, target)
        if earlier and (earlier.step, earlier.kind, earlier.dtype) == (manifest.step, kind, dtype) and not force:
            done = earlier
        elif target.exists() and not force:
            raise occupied
        if dry_run:
            size = manifest.model["num_parameters"] * BYTES[dtype] if kind == "model" else None
            facts = {"path": str(target), "step": manifest.step, "kind": kind, "dtype": dtype, "bytes": size}
            _print_push({**facts, **_goes_to(repository), "exists": exists}, as_json=as_json)
            return
        publishing.make_repository(repository)
        if done:
            write_card(target, folder, run, manifest, kind=kind, dtype=dtype, license=license)
    done = done or export_checkpoint(folder, target, step=step, dtype=dtype, merge=merge, license=license)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    facts = {"path": str(target), "step": done.step, "kind": done.kind, "dtype": done.dtype, "bytes": size}
    if not as_json:
        click.echo(f"step {done.step} → {target} ({done.kind}, {size / 2**20:.1f} MiB, {done.dtype})")
    if repository:
        commit = publishing.push(target, repository, message=f"{folder.name}, step {done.step}")
        facts |= {**_goes_to(repository), "commit": commit}
        folder.record("pushed", **_goes_to(repository), commit=commit, step=done.step)
        if not as_json:
            click.echo(f"pushed to {repository.url}, commit {commit[:12]}")
    if as_json:
        print_json(facts)


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _goes_to(repository: Repository) -> dict[str, Any]:
    return {
        "repository": repository.name,
        "url": repository.url,
        "revision": repository.revision or "main",
        "private": repository.private,
    }


def _must_load_elsewhere(run: Run, kind: str) -> None:
    from windlass.trainer.results.model_card import base_model

    if kind == "adapter" and base_model(run) is None:
        raise UserError(
            "the adapter's model is a folder of this machine, which nobody else has",
            evidence=f"model.path={run.model.path}",
            fix="--merge    pushes the whole model",
        )


def _print_push(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    size = f", about {facts['bytes'] / 2**20:,.1f} MiB" if facts["bytes"] else ""
    click.echo(f"step {facts['step']} ({facts['kind']}, {facts['dtype']}{size}) would go to {facts['url']}")
    new = f"is new, and would be {'private' if facts['private'] else 'public'}"
    click.echo(f"the repository {'exists, and the token may write to it' if facts['exists'] else new}")


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
