"""Why a job failed or waits: its facts collected from the run folder and the cluster, then judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.api.lookup import find
from windlass.api.schemas.runs import WhyResult
from windlass.diagnose import Facts, diagnose
from windlass.diagnose.bundle import facts_of_run, read_bundle, save_bundle
from windlass.diagnose.secrets import clean_text
from windlass.errors import UserError
from windlass.runfolder import runs_root
from windlass.targets import parse_place, target_of_kind
from windlass.targets.launch.ending import unrecorded_end
from windlass.targets.protocol import JobRef, KnowsFacts, Target


def explain(
    job: str | None = None,
    *,
    facts_file: Path | None = None,
    place: str | None = None,
    namespace: str | None = None,
    save: Path | None = None,
) -> WhyResult:
    """Why a run, a job KIND/NAME that windlass did not launch, or a bundle of facts failed or waits."""
    return judge(*_collect(job, facts_file, place, namespace), save=save)


def judge(facts: dict[str, Any], notes: list[str], *, save: Path | None = None) -> WhyResult:
    """The verdict on collected facts, secrets removed. `save`: a bundle that is written of them."""
    answer = diagnose(Facts.read(facts)).as_dict()
    for evidence in answer["evidence"]:
        evidence["line"] = clean_text(evidence["line"])
    answer["notes"] = [clean_text(note) for note in notes]
    if save is not None:
        save_bundle(facts, save)
        answer["saved"] = str(save)
    return WhyResult.model_validate(answer)


def facts_of_job(target: Target[Any], job: JobRef) -> tuple[dict[str, Any], list[str]]:
    """What the run folder holds and the cluster says, and what could not be asked for."""
    notes: list[str] = []
    live: dict[str, Any] = {}
    end = None
    try:
        end = unrecorded_end(job.folder, target.status(job))
        live = target.collect(job) if isinstance(target, KnowsFacts) else {}
    except UserError as error:
        reason = f": {error.evidence.splitlines()[-1]}" if error.evidence else ""
        notes.append(f"{error.what}{reason}; this is told from what the run folder holds")
    facts = facts_of_run(job.folder, end)
    archived = facts.pop("events", [])
    history = facts.get("job")
    facts |= {key: value for key, value in live.items() if value}
    facts["events"] = [*archived, *live.get("events", [])]
    if history and live.get("job"):
        facts["job"] = [live["job"], history]
    return facts, notes


def _collect(
    job: str | None, facts_file: Path | None, place: str | None, namespace: str | None
) -> tuple[dict[str, Any], list[str]]:
    """The facts that are asked about, and what could not be asked for."""
    if (job is None) == (facts_file is None):
        raise UserError("name one job, bundle or --facts file", fix="windlass why RUN    or windlass why bundle.tar")
    if facts_file is not None:
        if not facts_file.exists():
            raise UserError(f"there is no file {facts_file}", fix=f"ls {facts_file.parent}")
        return read_bundle(facts_file), []
    assert job is not None
    is_run = (runs_root() / job / "run.yaml").is_file() or (Path(job) / "run.yaml").is_file()
    if not place and not is_run and Path(job).exists():
        return read_bundle(Path(job)), []
    if "/" in job and not is_run:
        return _collect_named(job, place, namespace), []
    return facts_of_job(*find(job, place))


def _collect_named(job: str, place: str | None, namespace: str | None) -> dict[str, Any]:
    """The facts of a job by its kind and name: a number is Slurm's, everything else Kubernetes'."""
    kind, _, name = job.partition("/")
    is_slurm = kind == "job" and name.replace("_", "").isdigit() and namespace is None
    where, cluster = parse_place(place or ("slurm" if is_slurm else "kubernetes"))
    target = target_of_kind(where)
    if not name or "/" in name or not isinstance(target, KnowsFacts):
        raise UserError(f"there is no {job}", fix="windlass why RUN, pod/NAME, pytorchjob/NAME or job/NUMBER")
    return target.collect_named(kind, name, cluster, namespace)
