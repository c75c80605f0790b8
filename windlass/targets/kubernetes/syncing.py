"""Send changed code to a job that runs: its ConfigMaps are rewritten, and the ranks start anew with it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.errors import ExitCode, UserError
from windlass.spec import Run
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind
from windlass.targets.kubernetes.manifests.code import PART_BYTES, archive_digest, pack_code
from windlass.targets.kubernetes.manifests.labels import DOMAIN
from windlass.targets.kubernetes.pod.interface import CARRIED, CODE, DIGEST_KEY
from windlass.targets.kubernetes.pod_scripts import PodScripts

ARRIVE_SECONDS = 180.0  # a kubelet looks at ConfigMaps every minute, if nothing makes it look at once
POLL_SECONDS = 1.0
CODE_ANNOTATION = f"{DOMAIN}/code"


def folder_to_send(job: ClusterJob, run: Run, named: str | None) -> str:
    """The folder of code that goes to the pods: the named one, or the one that the run was submitted with from here.

    A run file that came from the cluster was written by whoever can write there: it does not choose a folder of this
    machine.
    """
    submitted = run.target.kubernetes.code or run.code
    if job.kind is JobKind.HYPERPOD:
        raise UserError(
            f"the ranks of {run.name} cannot be started anew with other code",
            cause="HyperPod's own agent starts them, and reads the code once, when its pod starts",
            fix=f"windlass stop {run.name}    and then `windlass run` again: it goes on from the last checkpoint",
        )
    if not submitted:
        raise UserError(
            f"{run.name} carries no code",
            cause="target.kubernetes.code was not set when it was submitted",
            fix="target.kubernetes.code=FOLDER    on `windlass run`; stop it first",
        )
    if job.adopted and not named:
        raise UserError(
            f"it is not said which folder of this machine goes to the pods of {run.name}",
            evidence=f"its run file, which came from the cluster, says {submitted}",
            cause="the run was submitted from another machine, and a run file from elsewhere sends nothing from here",
            fix=f"windlass sync {run.name} --code FOLDER",
        )
    return named or submitted


def sync(
    api: Api, job: ClusterJob, run: Run, folder: str, first: PodScripts, pods: Sequence[str], log: Callable[[str], None]
) -> bool:
    """Bring a folder of code into the pods of a run and restart the ranks; False if it is there already."""
    archive = pack_code(Path(folder).expanduser())
    digest = archive_digest(archive)
    maps = existing_maps(api, job)
    if any((config.get("data") or {}).get(f"{CODE}.{DIGEST_KEY}") == digest for config in maps):
        return False
    for value, part in zip(maps, parts_for(archive, maps, run.name), strict=True):
        path = object_path("v1", "configmaps", job.namespace, value["metadata"]["name"])
        data = {f"{CODE}.{DIGEST_KEY}": digest} if (value.get("data") or {}).get(f"{CODE}.{DIGEST_KEY}") else None
        key = next(iter(value.get("binaryData") or {}))
        change: Object = {"binaryData": {key: base64.b64encode(part).decode()}}
        api.patch(path, {**change, **({"data": data} if data else {})})
    log(f"sent {len(archive) / 1024:.0f} KiB of code ({digest[:12]}) to {job.object_name}")
    for name in pods:  # a changed pod is looked at by its kubelet at once, its volumes included
        api.patch(f"{job.pods_path}/{name}", {"metadata": {"annotations": {CODE_ANNOTATION: digest[:32]}}})
    wait_until_there(first, digest)
    # signal 1 to the pod's first process: all ranks save, and start anew with what is mounted then
    first.read("signal_process", "1", "HUP")
    log("the ranks save and start anew with it")
    return True


def existing_maps(api: Api, job: ClusterJob) -> list[Object]:
    prefix = f"{job.object_name}-{CODE}-"
    maps: list[Object] = []
    while True:
        value = api.find(object_path("v1", "configmaps", job.namespace, f"{prefix}{len(maps)}"))
        if value is None:
            break
        maps.append(value)
    if not maps:
        raise UserError(f"the code of {job.object_name} is not in the cluster", evidence=f"no ConfigMap {prefix}0")
    return maps


def parts_for(archive: bytes, maps: Sequence[Object], name: str) -> list[bytes]:
    """The archive in as many parts as the pods have mounted; later ones may be empty."""
    parts = [archive[begin : begin + PART_BYTES] for begin in range(0, len(archive), PART_BYTES)]
    if len(parts) > len(maps):
        raise UserError(
            f"the code has become too large for the pods of {name}",
            evidence=f"it needs {len(parts)} ConfigMaps, and the pods have {len(maps)} mounted",
            fix=f"windlass stop {name}    and then `windlass run` again",
        )
    return parts + [b""] * (len(maps) - len(parts))


def wait_until_there(first: PodScripts, digest: str) -> None:
    deadline = time.monotonic() + ARRIVE_SECONDS
    while first.read("part", f"{CARRIED}/{CODE}.{DIGEST_KEY}", "0", "0").decode().strip() != digest:
        if time.monotonic() > deadline:
            raise UserError(
                f"the new code has not come to {first.pod} within {ARRIVE_SECONDS:.0f} s",
                cause="its node's kubelet has not read the ConfigMap anew",
                fix="the same command again",
                exit_code=ExitCode.FAILED,
            )
        time.sleep(POLL_SECONDS)
