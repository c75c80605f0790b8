"""Nodes that are only objects: a thousand of them, with GPUs, for what only numbers show.

No kubelet speaks for them, so the controllers that find silent nodes dead are off while they exist, and pods bound to
them run only in name.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.cluster.box import control
from tests.cluster.box.api import Api
from tests.cluster.box.host import wait
from tests.cluster.box.layout import KUBECONFIG

LABEL = "windlass.test/fake"
THREADS = 8


@contextmanager
def fake_nodes(count: int, capacity: dict[str, str] | None = None) -> Iterator[list[str]]:
    names = [f"fake-{number:04d}" for number in range(count)]
    api = Api(KUBECONFIG)
    control.restart_controllers(without_node_care=True)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: _create(api, name, capacity or {}), names))
        yield names
    finally:
        remove(api)
        control.restart_controllers(without_node_care=False)


def pretend_running(namespace: str, selector: str) -> int:
    """What a kubelet would say of pods that are bound to fake nodes; how many there were."""
    api = Api(KUBECONFIG)
    pods = api.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")["items"]
    bound = [pod for pod in pods if pod["spec"].get("nodeName") and pod["status"].get("phase") == "Pending"]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda pod: _run(api, pod), bound))
    return len(bound)


def remove(api: Api) -> None:
    """Nodes and the pods on them: nobody else would ever end those."""
    ours = {item["metadata"]["name"] for item in api.get(f"/api/v1/nodes?labelSelector={LABEL}")["items"]}

    def stranded() -> list[str]:
        pods = [pod for pod in api.get("/api/v1/pods")["items"] if pod["spec"].get("nodeName") in ours]
        return [f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}" for pod in pods]

    def gone() -> bool:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda path: api.delete(path, grace_seconds=0), stranded()))
        return not stranded()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda name: api.delete(f"/api/v1/nodes/{name}"), ours))
    wait(gone, "pods on fake nodes removed", 300)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _create(api: Api, name: str, capacity: dict[str, str]) -> None:
    resources = {"cpu": "96", "memory": "1000Gi", "pods": "110"} | capacity
    labels = {LABEL: "true", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    ready = {"type": "Ready", "status": "True", "reason": "Fake", "lastHeartbeatTime": _now()}
    status = {
        "capacity": resources,
        "allocatable": resources,
        "conditions": [ready | {"lastTransitionTime": _now()}],
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
    }
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}
    api.post("/api/v1/nodes", node)
    # admission taints every new node until the node controller has seen it ready, and that one is off
    api.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})


def _run(api: Api, pod: dict[str, Any]) -> None:
    path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}/status"
    running = [
        {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": _now()}},
        }
        for container in pod["spec"]["containers"]
    ]
    conditions = [*pod["status"].get("conditions", []), {"type": "Ready", "status": "True"}]
    api.merge(
        path,
        {"status": {"phase": "Running", "startTime": _now(), "containerStatuses": running, "conditions": conditions}},
    )
