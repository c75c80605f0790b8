"""`windlass image test`: what an image shows when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from windlass.cli.image.options import (
    BUILDERS,
    LEVELS,
    assignments,
    builder_of,
    built_image,
    surroundings,
    surroundings_options,
)
from windlass.errors import ExitCode

if TYPE_CHECKING:
    from windlass.image.build.testing import Report


@click.command(short_help="Test an image from inside.")
@click.argument("what", metavar="RUN.yaml|IMAGE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--level", type=click.Choice(LEVELS), default="standard", show_default=True)
@click.option("--expect", "expected", multiple=True, metavar="NAME=VERSION", help="torch, cuda, nccl … as loaded.")
@click.option("--builder", type=click.Choice(BUILDERS), help="[default: the one that built it]")
@click.option("--records", type=click.Path(path_type=Path), default=Path("images"), show_default=True)
@click.option("--insecure", is_flag=True, help="A registry that the image is pulled from speaks plain HTTP.")
@surroundings_options
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
def test(
    what: str,
    overrides: tuple[str, ...],
    level: str,
    expected: tuple[str, ...],
    builder: str | None,
    records: Path,
    insecure: bool,
    python: str | None,
    mounts: tuple[str, ...],
    variables: tuple[str, ...],
    gpus: bool,
    smoke: str,
    imports: tuple[str, ...],
    as_json: bool,
) -> int:
    """Test an image from inside.

    \b
    quick      imports, versions as loaded (not as asked), one NCCL, requirements that hold
    standard   + model from its configuration, forward and backward, all-reduce of two processes
    full       + the trainer's own smoke run

    Of a run file, its newest built image. An image of a registry that is not here is pulled. Exit code 1 where a check
    fails.
    """
    from dataclasses import replace

    from windlass.cli.output import print_json
    from windlass.image.build.preparing import proof_of
    from windlass.image.build.records import Records
    from windlass.image.build.testing import fetch, prove_image
    from windlass.image.facts.node import Node, node_of

    kept = Records(records)
    run, record = built_image(what, overrides, kept)
    node = node_of(run) if run else Node()
    proof = proof_of(run, node, level, imports=imports, smoke=smoke)
    proof = replace(proof, expect={**proof.expect, **assignments("--expect", expected)})
    image = record.image if record and "@" not in what else what  # a digest is tested as that digest, not as a tag
    tool = builder_of(builder, record.builder if record else None)
    fetch(tool, image, plain_http=insecure)
    report = prove_image(tool, image, proof, surroundings(python, mounts, variables, gpus))
    if record:
        kept.add_proof(record, report.as_dict())
    if as_json:
        print_json(report.as_dict())
    else:
        _print(report)
    return ExitCode.OK if report.passed else ExitCode.FAILED


def _print(report: Report) -> None:
    for check in report.values["checks"]:
        if check["status"] != "skipped":
            click.echo(f"{check['status']:<7} {check['name']:<20} {check['detail']}")
        if check["status"] == "failed":
            for line in (check.get("evidence") or "").strip().splitlines()[-6:]:
                click.echo(f"{'':<28} | {line}")
    skipped = [check["name"] for check in report.values["checks"] if check["status"] == "skipped"]
    if skipped:
        click.echo(f"skipped {', '.join(name.removeprefix('import ') for name in skipped)}: not installed")
    verdict = "passed" if report.passed else f"{len(report.failures)} of {len(report.values['checks'])} checks failed"
    click.echo(f"{report.image}: {verdict} ({report.values['level']}, {report.values['seconds']} s)")
