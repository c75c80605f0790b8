"""`windlass ckpt`: the checkpoints of a run, listed, proven, exported."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click


@click.group()
def ckpt() -> None:
    """List, verify and export checkpoints."""


@ckpt.command("ls")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_checkpoints(name: str, as_json: bool) -> None:
    """Checkpoints of a run: step, size, age, and whether they are complete."""
    from windlass.checkpoint import CheckpointFolder
    from windlass.runfolder import RunFolder

    rows: list[dict[str, Any]] = []
    for one in CheckpointFolder(RunFolder.find(name).checkpoints).all():
        row: dict[str, Any] = {"step": one.step, "path": str(one.path), "complete": one.complete}
        try:
            manifest = one.manifest()
            row |= {"bytes": manifest.size, "created": manifest.created, "world_size": manifest.world_size}
            row |= {"tokens": manifest.tokens}
        except (OSError, ValueError, TypeError, KeyError):
            row |= {"bytes": one.size_on_disk(), "created": None, "world_size": None, "tokens": None}
        rows.append(row)
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo(f"no checkpoints in {name}")
    for row in rows:
        age = f"{_duration(time.time() - row['created'])} ago" if row["created"] else ""
        state = "complete" if row["complete"] else "incomplete (never taken for a resume)"
        tokens = f"{row['tokens']:,} tokens" if row["tokens"] is not None else ""
        click.echo(f"step {row['step']:>8}  {row['bytes'] / 2**20:>10.1f} MiB  {state:<12}  {age:<14}  {tokens}")


@ckpt.command()
@click.argument("name")
@click.option("--step", type=int, help="One step only. Default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def verify(name: str, step: int | None, as_json: bool) -> None:
    """Read every file and compare it with its manifest; exit code 1 if anything is damaged."""
    from windlass.checkpoint import CheckpointFolder
    from windlass.errors import ExitCode
    from windlass.runfolder import RunFolder

    folder = CheckpointFolder(RunFolder.find(name).checkpoints)
    chosen = [folder.choose(step)] if step is not None else folder.all()
    rows: list[dict[str, Any]] = []
    for one in chosen:
        damages = [{"file": d.file, "reason": d.reason} for d in one.damages()] if one.complete else []
        rows.append({"step": one.step, "complete": one.complete, "damages": damages})
    if as_json:
        click.echo(json.dumps(rows))
    else:
        for row in rows:
            state = "whole" if row["complete"] else "incomplete: a save was cut off; it is never resumed from"
            click.echo(f"step {row['step']:>8}  {state if not row['damages'] else 'DAMAGED'}")
            for item in row["damages"]:
                click.echo(f"{'':>15}{item['file']}: {item['reason']}")
    if any(row["damages"] for row in rows):
        raise SystemExit(int(ExitCode.FAILED))


@ckpt.command()
@click.argument("name")
@click.option("--step", type=int, help="Default: the newest complete one.")
@click.option("--to", "destination", type=click.Path(path_type=Path), help="Default: export/ in the run folder.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of the written weights; float32 keeps the master weights exactly.",
)
@click.option("--force", is_flag=True, help="Replace a folder that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(name: str, step: int | None, destination: Path | None, dtype: str, force: bool, as_json: bool) -> None:
    """Write a Hugging Face folder (safetensors, configuration, tokenizer) that transformers loads."""
    from windlass.errors import UserError
    from windlass.runfolder import RunFolder

    folder = RunFolder.find(name)
    target = destination or folder.export
    if target.exists() and not force:
        raise UserError(f"{target} exists", fix=f"windlass ckpt export {name} --force")
    from windlass.trainer.export import export_checkpoint

    done = export_checkpoint(folder, target, step=step, dtype=dtype)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    if as_json:
        click.echo(json.dumps({"path": str(target), "step": done, "dtype": dtype, "bytes": size}))
    else:
        click.echo(f"step {done} → {target} ({size / 2**20:.1f} MiB, {dtype})")


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
