"""`windlass cluster check` and `fix`: whether a cluster can take a run, and what windlass can make that is missing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from windlass.cli.jobs import context_option, json_option, namespace_option
from windlass.common.files import write_output

if TYPE_CHECKING:
    from windlass.clusters.fixing import Proposal
    from windlass.clusters.preflight import Checked
    from windlass.clusters.result import Result
    from windlass.targets.kubernetes.api.http import Api


BEFORE_PODS = ("run", "namespace", "capacity", "quota", "claim", "service-account")


@click.command(short_help="Say whether a cluster can take a run.")
@click.argument("run_file", required=False)
@click.argument("overrides", nargs=-1)
@context_option
@namespace_option
@click.option("--deep", is_flag=True, help="Run pods too: names, links, collectives, disks, and a short training.")
@click.option("--train/--no-train", default=True, help="With --deep: train a tiny model at last. On by default.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write the results as JUnit XML too.")
@json_option
def check(
    run_file: str | None,
    overrides: tuple[str, ...],
    context: str | None,
    namespace: str | None,
    deep: bool,
    train: bool,
    junit: Path | None,
    as_json: bool,
) -> int:
    """Check a cluster: the API, permissions, operators, nodes, devices, room, queues and storage.

    With a run file: against what that run needs. Creates nothing, except with --deep: then the run's own pods, with
    another command, try the network and the disks, and a tiny model is trained. Exit code 1 where a check fails.
    """
    import time

    from windlass.cli.output import print_json
    from windlass.clusters import result as results
    from windlass.clusters.preflight import look
    from windlass.errors import ExitCode, UserError

    if junit and not junit.parent.is_dir():
        raise UserError(
            f"the results cannot be written to {junit}",
            evidence=f"there is no folder {junit.parent}",
            fix=f"mkdir -p {junit.parent}",
        )
    begin = time.monotonic()
    checked = look(run_file, overrides, context, namespace)
    if deep:
        checked.results.extend(_look_deeper(checked, run_file, overrides, train=train))
    seconds, api = time.monotonic() - begin, checked.api
    status = results.overall(checked.results)
    if junit:
        write_output(junit, results.junit(checked.results, cluster=api.access.context, seconds=seconds))
    if as_json:
        print_json(
            {
                "context": api.access.context,
                "namespace": api.access.namespace,
                "status": status,
                "requests": api.num_requests,
                "results": [asdict(result) for result in checked.results],
            }
        )
    else:
        _print(checked.results, api, seconds)
    return ExitCode.FAILED if status == "fail" else ExitCode.OK


@click.command(short_help="Make what a check found missing.")
@click.argument("run_file", required=False)
@click.argument("overrides", nargs=-1)
@context_option
@namespace_option
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Objects to create too: an operator's release, a device plugin. May be given several times.",
)
@click.option(
    "--helm",
    "releases",
    multiple=True,
    metavar="NAME@VERSION",
    help="A Helm release to create too: nvidia-device-plugin, aws-efa-k8s-device-plugin, cert-manager, jobset, "
    "kubeflow-trainer, kueue. Needs helm. May be given several times.",
)
@click.option("--storage-class", metavar="CLASS", help="Make the run's claim, of this class, if it is not there.")
@click.option(
    "--for", "user", metavar="USER", help="Who gets permissions: all that a run needs. Default: you, those you lack."
)
@click.option("--undo", is_flag=True, help="Delete what an earlier fix made.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def fix(
    run_file: str | None,
    overrides: tuple[str, ...],
    context: str | None,
    namespace: str | None,
    manifests: tuple[Path, ...],
    releases: tuple[str, ...],
    storage_class: str | None,
    user: str | None,
    undo: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Make what a check found missing: the namespace, permissions, a service account, a claim; given manifests and Helm
    releases.

    The objects are shown first. Nothing that is there is changed. Afterwards the check is run again, and what did not
    help is said; --undo deletes what was made.
    """
    from windlass.cli.output import print_json, print_table
    from windlass.clusters import fixing, helm
    from windlass.clusters.preflight import look
    from windlass.errors import ExitCode

    given = fixing.from_manifests(manifests) + [helm.from_release(release) for release in releases]
    before = look(run_file, overrides, context, namespace)
    api, place = before.api, before.api.access.namespace
    if undo:
        made = given + fixing.made_here(api, place)
        _show(made, as_json=as_json)
        confirm("Delete what windlass made of these?", yes=yes)
        outcomes = fixing.undo(api, made, place)
    else:
        lacks = any(access.is_allowed is False for access in before.snapshot.accesses)
        who = user or (fixing.who_am_i(api) if lacks else "")
        proposals = fixing.propose(
            before.snapshot, before.needs, user=who, is_self=user is None, storage_class=storage_class
        )
        proposals += given
        if not proposals and not as_json:
            click.echo("there is nothing that windlass can make: the fixes of `windlass cluster check` are for you")
            return _gravity(before.results)
        if proposals:
            _show(proposals, as_json=as_json)
            confirm("Create these?", yes=yes)
        outcomes = fixing.apply(api, proposals, place)
    after = look(run_file, overrides, context, namespace)
    unhelped = [result for result in after.results if result.status == "fail"]
    if as_json:
        print_json(
            {
                "outcomes": [{"object": outcome.name, "result": outcome.result} for outcome in outcomes],
                "results": [asdict(result) for result in after.results],
            }
        )
    else:
        print_table(["OBJECT", "RESULT"], [[outcome.name, outcome.result] for outcome in outcomes])
        if not undo:
            failed = [sum(result.status == "fail" for result in checked.results) for checked in (before, after)]
            click.echo(f"checked again: {failed[0]} checks failed before, {failed[1]} fail now")
            if unhelped and any(outcome.result == "created" for outcome in outcomes):
                click.echo("still failing: " + "; ".join(result.summary for result in unhelped))
                click.echo("  windlass cluster fix --undo    takes away what was made")
    return ExitCode.OK if undo else _gravity(after.results)


def _look_deeper(checked: Checked, run_file: str | None, overrides: tuple[str, ...], *, train: bool) -> list[Result]:
    """Run pods, unless a check has already failed that would keep them from running."""
    from windlass.clusters.deep import pods, training
    from windlass.clusters.deep.judging import judge
    from windlass.clusters.result import Result
    from windlass.errors import UserError

    if run_file is None:
        raise UserError(
            "--deep needs a run file: its pods say what to try", fix="windlass cluster check my.yaml --deep"
        )
    if checked.needs.pod is None or any(
        result.check in BEFORE_PODS and result.status == "fail" for result in checked.results
    ):
        return [Result("deep-pods", "skip", "no pods were run", "a check above failed that would keep them waiting")]
    namespace = checked.api.access.namespace
    results = judge(pods.run(checked.api, checked.needs, namespace), checked.needs, _line_rate(run_file, overrides))
    return [*results, training.train(run_file, overrides, checked.api.access)] if train else results


def _line_rate(run_file: str, overrides: tuple[str, ...]) -> float | None:
    """The network of the run's instance type, by the catalogue."""
    from windlass.catalog.instances import instance
    from windlass.spec import load_run

    name = load_run(run_file, list(overrides)).resources.instance
    return instance(name).network_gbps if name else None


def _print(found: list[Result], api: Api, seconds: float) -> None:
    from windlass.cli.output import print_table, styled

    style = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
    print_table(
        ["", "CHECK", "WHAT"],
        [[styled(result.status, style[result.status]), result.check, result.summary] for result in found],
        notes=[_note(result) for result in found],
    )
    counts = ", ".join(
        f"{number} {status}" for status in style if (number := sum(result.status == status for result in found))
    )
    click.echo(f"{api.access.context}: {counts} ({api.num_requests} requests, {seconds:.1f} s)")


def _note(result: Result) -> str | None:
    if result.status == "pass":
        return None
    parts = [result.evidence, f"fix: {result.fix}" if result.fix else None]
    return "\n".join(part for part in parts if part) or None


def _gravity(results: list[Result]) -> int:
    from windlass.clusters.result import overall
    from windlass.errors import ExitCode

    return ExitCode.FAILED if overall(results) == "fail" else ExitCode.OK


def _show(proposals: list[Proposal], *, as_json: bool) -> None:
    """The exact objects, as YAML: on stderr where stdout is for JSON."""
    import yaml

    for proposal in proposals:
        click.echo(f"# {proposal.check}: {proposal.what}", err=as_json)
        click.echo(yaml.safe_dump_all(proposal.objects, sort_keys=False).rstrip(), err=as_json)


def confirm(question: str, *, yes: bool) -> None:
    """Ask, and go on only after a yes; refuse where nobody can be asked."""
    from windlass.cli.output import must_be_asked

    if not yes:
        what = f"without a terminal, windlass cluster {click.get_current_context().info_name} needs --yes"
        must_be_asked(f"{what}; nothing was done", fix="the same command again, with --yes")
        click.confirm(question, abort=True, err=True)
