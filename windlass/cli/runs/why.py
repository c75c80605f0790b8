"""`windlass why`: why a job failed or waits, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windlass.cli.jobs import on_option, run_names

if TYPE_CHECKING:
    from windlass.diagnose import Verdict

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
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def why(
    job: str | None, facts_file: Path | None, save: Path | None, namespace: str | None, place: str | None, as_json: bool
) -> None:
    """Say why a job failed or waits.

    RUN is the name of a run. KIND/NAME is a job that windlass did not launch: pod/NAME, pytorchjob/NAME, trainjob,
    jobset, rayjob or job on Kubernetes, job/NUMBER on Slurm. BUNDLE is what --save wrote, or a folder with facts and
    logs: it is diagnosed anywhere, without a cluster.
    """
    from windlass.cli.output import print_json
    from windlass.diagnose import Facts, diagnose
    from windlass.diagnose.bundle import save_bundle
    from windlass.diagnose.secrets import clean_text

    facts, notes = _collect(job, facts_file, place, namespace)
    verdict = diagnose(Facts.read(facts))
    if save is not None:
        save_bundle(facts, save)
    notes = [clean_text(note) for note in notes]
    if as_json:
        answer = verdict.as_dict()
        for one in answer["evidence"]:
            one["line"] = clean_text(one["line"])
        print_json({**answer, "notes": notes, **({"saved": str(save)} if save else {})})
        return
    for note in notes:
        click.echo(f"note: {note}", err=True)
    click.echo(describe(verdict))
    if save is not None:
        click.echo(f"\nsaved     {save}: facts and logs, secrets removed; windlass why {save}")


def _collect(
    job: str | None, facts_file: Path | None, place: str | None, namespace: str | None
) -> tuple[dict[str, Any], list[str]]:
    """The facts that are asked about, and what could not be asked for."""
    from windlass.cli.jobs import find
    from windlass.diagnose.bundle import facts_of_run, read_bundle
    from windlass.errors import UserError
    from windlass.runfolder import runs_root
    from windlass.targets.protocol import KnowsFacts

    if (job is None) == (facts_file is None):
        raise UserError("name one job, bundle or --facts file", fix="windlass why RUN    or windlass why bundle.tar")
    if facts_file is not None:
        return read_bundle(_existing(facts_file)), []
    assert job is not None
    is_run = (runs_root() / job / "run.yaml").is_file() or (Path(job) / "run.yaml").is_file()
    if not place and not is_run and Path(job).exists():
        return read_bundle(Path(job)), []
    if "/" in job and not is_run:
        return _collect_named(job, place, namespace), []
    target, ref = find(job, place)
    notes: list[str] = []
    live: dict[str, Any] = {}
    try:
        live = target.collect(ref) if isinstance(target, KnowsFacts) else {}
    except UserError as error:
        reason = f": {error.evidence.splitlines()[-1]}" if error.evidence else ""
        notes.append(f"{error.what}{reason}; this is told from what the run folder holds")
    facts = facts_of_run(ref.folder)
    archived = facts.pop("events", [])
    history = facts.get("job")
    facts |= {key: value for key, value in live.items() if value}
    facts["events"] = [*archived, *live.get("events", [])]
    if history and live.get("job"):
        facts["job"] = [live["job"], history]
    return facts, notes


def _collect_named(job: str, place: str | None, namespace: str | None) -> dict[str, Any]:
    """The facts of a job by its kind and name: a number is Slurm's, everything else Kubernetes'."""
    from windlass.errors import UserError
    from windlass.targets import target_of_kind
    from windlass.targets.protocol import KnowsFacts

    kind, _, name = job.partition("/")
    is_slurm = kind == "job" and name.replace("_", "").isdigit() and namespace is None
    where, _, cluster = (place or ("slurm" if is_slurm else "kubernetes")).partition(":")
    target = target_of_kind(where)
    if not name or "/" in name or not isinstance(target, KnowsFacts):
        raise UserError(f"there is no {job}", fix="windlass why RUN, pod/NAME, pytorchjob/NAME or job/NUMBER")
    return target.collect_named(kind, name, cluster or None, namespace)


def _existing(path: Path) -> Path:
    from windlass.errors import UserError

    if not path.exists():
        raise UserError(f"there is no {path}")
    return path


def describe(verdict: Verdict) -> str:
    """The verdict for a person: what, how sure and why, the evidence, the fix."""
    from windlass.cli.output import plain
    from windlass.diagnose.secrets import clean_text

    sure = "sure" if verdict.confidence >= SURE else "likely" if verdict.confidence >= LIKELY else "perhaps"
    if verdict.name == "unknown":
        lines = ["unknown: the facts do not tell why", f"why       {verdict.why}"]
    else:
        lines = [f"{verdict.name}: {verdict.cause}", f"how sure  {sure} ({verdict.confidence:.0%}): {verdict.why}"]
    for index, one in enumerate(verdict.evidence):
        place = ", ".join(
            text
            for text in (one.source, f"rank {one.rank}" if one.rank is not None else "", one.host or "", one.time or "")
            if text
        )
        lines.append(f"{'evidence' if index == 0 else '':<9} {clean_text(one.line)}")
        lines.append(f"{'':<9}   ({place})")
    if verdict.candidates:
        others = ", ".join(f"{name} ({confidence:.0%})" for name, confidence in verdict.candidates)
        lines.append(f"or        {others}")
    retry = {
        "yes": "another attempt may help",
        "no": "another attempt would fail again",
        "wait": "wait",
        "policy": "it depends: see the fix",
    }
    if verdict.name not in ("running", "succeeded", "unknown"):
        lines.append(f"retry     {verdict.retry}: {retry[verdict.retry]}")
    lines.append(f"fix       {verdict.fix}")
    return plain("\n".join(lines))
