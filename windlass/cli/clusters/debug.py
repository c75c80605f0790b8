"""`windlass debug`: whether the pods of a run reach each other, and how fast."""

from __future__ import annotations

from dataclasses import asdict

import click

from windlass.cli.jobs import on_option, run_names


@click.command(short_help="Measure the network between the pods of a run.")
@click.argument("name", shell_complete=run_names)
@on_option
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
def debug(name: str, place: str | None, as_json: bool) -> int:
    """Measure the network between the pods of a run.

    Every pod looks up the meeting place in DNS and connects to its port; then each sends to the next for a second.
    Exit code 1 if anything failed.
    """
    from windlass.cli.clusters.clusters import find_on_cluster, pod_scripts_of
    from windlass.cli.output import print_json, print_table
    from windlass.errors import ExitCode
    from windlass.targets.kubernetes.manifests.environment import host_name
    from windlass.targets.kubernetes.network import bandwidths, names_and_port
    from windlass.targets.kubernetes.pod.interface import COORDINATOR_PORT

    target, job = find_on_cluster(name, place)
    run = job.folder.load_run()
    pods, scripts = pod_scripts_of(target, job)
    findings = names_and_port(scripts, host_name(run), run.target.port or COORDINATOR_PORT)
    findings += bandwidths(scripts, [pod.address for pod in pods])
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = [
            [finding.check, finding.origin, finding.destination, "ok" if finding.ok else "FAILED", finding.said]
            for finding in findings
        ]
        print_table(["CHECK", "FROM", "TO", "", "RESULT"], rows)
    return ExitCode.OK if all(finding.ok for finding in findings) else ExitCode.FAILED
