"""The box as a whole: up, down, and whether it could be."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster.box import addons, build, certificates, control, host, hyperpod, images, node, operators
from tests.cluster.box.api import Api, patiently
from tests.cluster.box.host import BoxError, wait
from tests.cluster.box.layout import DEVELOPER_KUBECONFIG, KUBECONFIG, LOCK, NODES, ROOT, STORAGE, SYSTEM_LABEL, Node

# what must be installed -> the Debian package that has it
NEEDED = {
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "ip": "iproute2",
    "nsenter": "util-linux",
}


# what a server says that is only busy or just starting
PASSING = ("failed calling webhook", "connection refused", "(InternalError)", "(TooManyRequests)", "imeout", "deadline")


def why_not() -> str | None:
    """Why no box can be started here."""
    if os.geteuid() != 0:
        return "a cluster of our own needs root (namespaces, control groups)"
    packages = [package for name, package in NEEDED.items() if shutil.which(name, path=host.SEARCH_PATH) is None]
    if not (node.CNI_PLUGINS / "bridge").exists():
        packages.append("containernetworking-plugins")
    if images.busybox() is None:
        packages.append("busybox-static")
    if packages:
        return f"not installed: {', '.join(packages)}"
    return build.why_not()


def up(say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)) -> None:
    """Start everything, while a keeper holds the lock. What a killed session left is removed first."""
    reason = why_not()
    if reason:
        raise BoxError(reason)
    build.build()
    host.sweep()
    begin = time.monotonic()

    def passed(what: str) -> None:
        say(f"box: {what} after {time.monotonic() - begin:.1f} s")

    ROOT.mkdir(mode=0o700)
    (ROOT / "pid").mkdir()
    STORAGE.mkdir()
    certificates.make()
    certificates.kubeconfig(KUBECONFIG, "admin")
    certificates.kubeconfig(DEVELOPER_KUBECONFIG, "developer")
    host.make_cgroups()
    host.make_bridge()
    control.start_storage()
    control.start_api()
    images.write(ROOT / "images.tar", build.binary("pause"))
    with ThreadPoolExecutor(max_workers=len(NODES) + 1) as pool:
        rendered = pool.submit(operators.manifests)
        list(pool.map(_prepare, NODES))  # one that fails is raised here
        api = control.wait_for_api()
        passed("API server ready")
        control.start_controllers()
        control.start_scheduler()
        for one in NODES:
            node.start_kubelet(one)
            node.start_proxy(one)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait(lambda: patiently(lambda: api.exists(account)), "service accounts", 120, _logs())
        apply([*addons.people(), *addons.dns(), *addons.shared_storage("default")])
        wait(lambda: patiently(lambda: ready_nodes(api) == {one.name for one in NODES}), "nodes ready", 180, _logs())
        label(api)
        passed(f"{len(NODES)} nodes ready")
        apply([*rendered.result(), hyperpod.definition()])
    wait(lambda: deployment_ready(api, "kube-system", "coredns"), "cluster DNS", 180, _logs())
    passed("DNS ready")
    wait(lambda: all(deployment_ready(api, *one) for one in operators.DEPLOYMENTS), "operators ready", 300, _logs())
    apply(operators.runtimes(api))
    _start_hyperpod_stand_in()
    passed("operators ready")


def _start_hyperpod_stand_in() -> None:
    command: list[str | Path] = [sys.executable, "-m", "tests.cluster.box.hyperpod", KUBECONFIG]
    host.spawn("hyperpod-stand-in", "control", command, {"PYTHONPATH": str(Path(__file__).parents[3])})


def _prepare(one: Node) -> None:
    node.make(one)
    node.start_containerd(one, ROOT / "images.tar")


def _logs() -> list[Path]:
    return sorted((ROOT / "log").glob("*.log"))


def label(api: Api) -> None:
    for one in NODES:
        labels = {"topology.kubernetes.io/zone": "box-a", "node.kubernetes.io/instance-type": "box"}
        if one == NODES[0]:
            labels[SYSTEM_LABEL] = "true"
        api.merge(f"/api/v1/nodes/{one.name}", {"metadata": {"labels": labels}})


def ready_nodes(api: Api) -> set[str]:
    found = set()
    for item in api.get("/api/v1/nodes")["items"]:
        conditions = {one["type"]: one["status"] for one in item["status"].get("conditions", [])}
        if conditions.get("Ready") == "True":
            found.add(item["metadata"]["name"])
    return found


def deployment_ready(api: Api, namespace: str, name: str) -> bool:
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"
    return patiently(lambda: bool(api.get(path)["status"].get("readyReplicas")))


def apply(objects: list[addons.Object]) -> None:
    """Create or change them, as `kubectl apply --server-side` does."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    kubectl = [str(build.binary("kubectl")), "--kubeconfig", str(KUBECONFIG)]
    command = [*kubectl, "apply", "--server-side", "--force-conflicts", "-f", "-"]

    def applied() -> bool:
        result = subprocess.run(command, input=text, text=True, capture_output=True, check=False, timeout=300)
        if result.returncode != 0 and not any(reason in result.stderr for reason in PASSING):
            raise BoxError(f"kubectl apply: {result.stderr[-3000:]}")
        return result.returncode == 0

    wait(applied, "objects applied", 180, _logs())


def take_lock(seconds: float = 900) -> int:
    """Names and addresses are fixed: one box at a time on a machine, whoever asks."""
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)

    def free() -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    wait(free, f"another box is up on this machine ({LOCK}); `python -m tests.cluster.box down` ends it", seconds)
    return lock
