"""`windlass sync`: changed code into the pods of a run that goes on."""

from __future__ import annotations

import click

from windlass.cli.jobs import on_option, run_names


@click.command(short_help="Send changed code to a run's pods.")
@click.argument("name", shell_complete=run_names)
@on_option
@click.option(
    "--code", "folder", metavar="FOLDER", help="The folder to send. Default: the one it was submitted with here."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def sync(name: str, place: str | None, folder: str | None, as_json: bool) -> None:
    """Send changed code to a run's pods.

    The folder of target.kubernetes.code is packed again and replaces what the job carries; the ranks save, and start
    anew with it. No new image, no new pods. A run that was submitted from another machine needs --code: its run file
    comes from the cluster, and does not choose a folder of this one.
    """
    from windlass.cli.clusters.clusters import find_on_cluster, pod_scripts_of
    from windlass.cli.output import print_json
    from windlass.targets.kubernetes.manifests.request import with_options
    from windlass.targets.kubernetes.syncing import folder_to_send
    from windlass.targets.kubernetes.syncing import sync as send

    target, job = find_on_cluster(name, place)
    api, cluster_job = target.cluster(job)
    run = job.folder.load_run()
    folder = folder_to_send(cluster_job, run, folder)
    pods, scripts = pod_scripts_of(target, job)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if not as_json:
            click.echo(text)

    changed = send(api, cluster_job, run, folder, scripts[0], [pod.name for pod in pods], say)
    if changed:
        target.note_new_code(job, with_options(run, code=folder))
    if as_json:
        print_json({"name": name, "changed": changed, "said": said})
    elif not changed:
        click.echo(f"the pods of {name} have this code already")
