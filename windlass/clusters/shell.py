"""A shell on a node: an SSM session on an instance of AWS, or a privileged pod where that is asked for."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from windlass.common import aws
from windlass.errors import UserError
from windlass.targets.kubernetes.api.execution import interactively
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import object_path

EC2_NODE = re.compile(r"aws:///(?P<region>[a-z]+(?:-[a-z]+)+-\d+)[a-z0-9-]*/(?P<instance>i-[0-9a-f]+)$")
HYPERPOD_NODE = re.compile(r"hyperpod-(?P<instance>i-[0-9a-f]+)$")  # they have no provider ID of that form
REGION_LABEL = "topology.kubernetes.io/region"
START_SECONDS = 120.0


def ssm(node: Object) -> int:
    """An SSM session on the instance of a node."""
    name = node["metadata"]["name"]
    plugin = shutil.which("session-manager-plugin")
    if plugin is None:
        raise UserError(
            "AWS' session-manager-plugin is not installed",
            evidence="no program of that name is in $PATH",
            fix=f"windlass cluster shell {name} --debug-pod IMAGE    needs none",
        )
    target, region = session_target(node)
    client = aws.client("ssm", region)
    with aws.asking(f"starting a session on {name}"):
        session = client.start_session(Target=target)
    opened = {key: session[key] for key in ("SessionId", "TokenValue", "StreamUrl")}
    arguments: list[Any] = [plugin, json.dumps(opened), client.meta.region_name, "StartSession", ""]
    arguments += [json.dumps({"Target": target}), client.meta.endpoint_url]
    return subprocess.run(arguments).returncode


def session_target(node: Object) -> tuple[str, str | None]:
    """What SSM calls the instance of a node, and its region."""
    metadata, provider = node["metadata"], str((node.get("spec") or {}).get("providerID") or "")
    match = EC2_NODE.match(provider)
    if match is not None:
        return match["instance"], match["region"]
    match = HYPERPOD_NODE.match(metadata["name"])
    if match is None:
        raise UserError(
            f"the node {metadata['name']} is no EC2 or HyperPod instance that SSM could reach",
            evidence=f"spec.providerID: {provider or 'none'}",
            fix=f"windlass cluster shell {metadata['name']} --debug-pod IMAGE",
        )
    region = (metadata.get("labels") or {}).get(REGION_LABEL)
    return _hyperpod_target(match["instance"], region), region


def _hyperpod_target(instance: str, region: str | None) -> str:
    """`sagemaker-cluster:CLUSTER_GROUP-INSTANCE`: the cluster's id and the instance group are not in the node."""
    client = aws.client("sagemaker", region)
    with aws.asking(f"looking for the HyperPod cluster of {instance}"):
        for page in client.get_paginator("list_clusters").paginate():
            for cluster in page["ClusterSummaries"]:
                try:
                    answer = client.describe_cluster_node(ClusterName=cluster["ClusterName"], NodeId=instance)
                except client.exceptions.ClientError as error:
                    if aws.error_code(error) in ("ResourceNotFound", "ValidationException"):
                        continue
                    raise
                group = answer["NodeDetails"]["InstanceGroupName"]
                return f"sagemaker-cluster:{cluster['ClusterArn'].rpartition('/')[2]}_{group}-{instance}"
    raise UserError(
        f"no HyperPod cluster in {client.meta.region_name} has the instance {instance}",
        fix="AWS_REGION=REGION, or another AWS_PROFILE",
    )


def debug_pod(api: Api, node: Object, namespace: str, image: str, command: Sequence[str]) -> int:
    """A privileged pod on the node with the node's file system under /host; deleted when the shell ends."""
    pod = pod_on(str(node["metadata"]["name"]), namespace, image)
    pods = object_path("v1", "pods", namespace)
    name = pod["metadata"]["name"]
    api.create(pods, pod)
    try:
        _wait_until_running(api, f"{pods}/{name}")
        return interactively(api, namespace, name, list(command), container="shell")
    finally:
        api.delete(f"{pods}/{name}", grace=0)


def pod_on(node: str, namespace: str, image: str) -> Object:
    container = {
        "name": "shell",
        "image": image,
        "command": ["sleep", "86400"],
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": "host", "mountPath": "/host"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"windlass-shell-{secrets.token_hex(3)}", "namespace": namespace},
        "spec": {
            "nodeName": node,  # also on a cordoned one: nothing schedules it
            "hostPID": True,
            "hostNetwork": True,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 86400,
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
            "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        },
    }


def _wait_until_running(api: Api, path: str) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        status = api.get(path).get("status") or {}
        if status.get("phase") == "Running":
            return
        if status.get("phase") in ("Failed", "Succeeded") or time.monotonic() > until:
            states = [container.get("state") for container in status.get("containerStatuses") or ()]
            raise UserError(
                "the pod on the node does not start",
                evidence=f"{status.get('phase')}: {status.get('message') or json.dumps(states)}",
            )
        time.sleep(0.5)
