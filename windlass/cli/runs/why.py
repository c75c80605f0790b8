"""`windlass why`: why a job failed or waits, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from windlass.cli.jobs import json_option, on_option, run_names
from windlass.cli.output import plain, print_json

if TYPE_CHECKING:
    from windlass.api.schemas.runs import WhyResult

SURE, LIKELY = 0.8, 0.5


@click.command(short_help="Say why a job failed or waits.")
@click.argument("job", required=False, metavar="RUN|BUNDLE|KIND/NAME", shell_complete=run_names)
@click.option(
    "--facts", "facts_file", type=click.Path(path_type=Path), help="A JSON file of facts (docs/facts.schema.json)."
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="BUNDLE.tar",
    help="Keep the facts, secrets removed.",
)
@click.option("--namespace", "-n", metavar="NAMESPACE", help="Of KIND/NAME on Kubernetes.")
@on_option
@json_option
def why(
    job: str | None, facts_file: Path | None, save: Path | None, namespace: str | None, place: str | None, as_json: bool
) -> None:
    """Say why a job failed or waits.

    RUN is the name of a run. KIND/NAME is a job that windlass did not launch: pod/NAME, pytorchjob/NAME, trainjob,
    jobset, rayjob or job on Kubernetes, job/NUMBER on Slurm. BUNDLE is what --save wrote, a folder with facts and logs,
    a single log, or what `kubectl get pods -o json` printed: it is diagnosed anywhere, without a cluster.
    """
    from windlass.api.diagnosis import explain

    result = explain(job, facts_file=facts_file, place=place, namespace=namespace, save=save)
    if as_json:
        print_json(result)
        return
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(describe(result))
    if save is not None:
        click.echo(f"\nsaved     {save}: facts and logs, secrets removed; windlass why {save}")


def describe(verdict: WhyResult) -> str:
    """The verdict for a person: what, how sure and why, the evidence, the fix."""
    sure = "sure" if verdict.confidence >= SURE else "likely" if verdict.confidence >= LIKELY else "perhaps"
    if verdict.name == "unknown":
        lines = ["unknown: the facts do not tell why", f"why       {verdict.why}"]
    else:
        lines = [f"{verdict.name}: {verdict.cause}", f"how sure  {sure} ({verdict.confidence:.0%}): {verdict.why}"]
    for index, proof in enumerate(verdict.evidence):
        place = ", ".join(
            text
            for text in (
                proof.source,
                f"rank {proof.rank}" if proof.rank is not None else "",
                proof.host or "",
                proof.time or "",
            )
            if text
        )
        lines.append(f"{'evidence' if index == 0 else '':<9} {proof.line}")
        lines.append(f"{'':<9}   ({place})")
    if verdict.candidates:
        others = ", ".join(f"{other.name} ({other.confidence:.0%})" for other in verdict.candidates)
        lines.append(f"or        {others}")
    retry = {
        "yes": "another attempt may help",
        "no": "another attempt would fail again",
        "wait": "wait",
        "policy": "it depends: see the fix",
    }
    if verdict.name not in ("running", "succeeded", "unknown", "cancelled"):
        lines.append(f"retry     {verdict.retry}: {retry[verdict.retry]}")
    nothing_to_see = verdict.name == "unknown" and not verdict.evidence
    lines.append(f"fix       {'its pods, events or logs say more: docs/why.md' if nothing_to_see else verdict.fix}")
    return plain("\n".join(lines))
