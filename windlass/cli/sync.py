"""`windlass sync`: changed code into the pods of a run that goes on."""

from __future__ import annotations

import click

from windlass.cli.jobs import on_option, run_names


@click.command(short_help="Send changed code to a run's pods.")
@click.argument("name", shell_complete=run_names)
@on_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def sync(name: str, place: str | None, as_json: bool) -> None:
    """Send changed code to a run's pods.

    The folder of target.kubernetes.code is packed again and replaces what the job carries; the ranks save, and start
    anew with it. No new image, no new pods.
    """
    from windlass.cli.clusters import errands_of, find_on_cluster
    from windlass.cli.output import print_json
    from windlass.targets.kubernetes.syncing import sync as send

    target, job = find_on_cluster(name, place)
    pods, errands = errands_of(target, job)
    api, cluster_job = target.cluster(job)
    run = job.folder.load_run()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if not as_json:
            click.echo(text)

    changed = send(api, cluster_job, run, errands[0], [pod.name for pod in pods], say)
    if changed:
        target.note_new_code(job, run)
    if as_json:
        print_json({"name": name, "changed": changed, "said": said})
    elif not changed:
        click.echo(f"the pods of {name} have this code already")
