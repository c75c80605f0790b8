"""The cluster as tests see it: the box, or one that KUBECONFIG names; what can be asked of it and done to it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.box import addons, build, control, fleet, host, keeper, machine, node, overlay
from tests.cluster.box.api import Api
from tests.cluster.box.layout import CLAIM, KUBECONFIG, NODES, ROOT, STORAGE, SYSTEM_LABEL, TRAINER_IMAGE, Node

IMAGE_VARIABLE = "WINDLASS_TEST_IMAGE"  # on a cluster that is not the box: an image with windlass in it
CLAIM_VARIABLE = "WINDLASS_TEST_CLAIM"  # and a claim that pods on several nodes can write


class Cluster:
    def __init__(self, kubeconfig: Path, *, box: bool) -> None:
        self.kubeconfig = kubeconfig
        self.is_box = box
        binary = build.binary("kubectl")
        self.binary = str(binary) if binary.exists() else shutil.which("kubectl")

    # --- questions

    def kubectl(self, *arguments: Any, stdin: str | None = None, timeout: float = 120, check: bool = True) -> str:
        if self.binary is None:
            pytest.skip("kubectl is not installed")
        result = subprocess.run(
            [self.binary, *map(str, arguments)],
            input=stdin,
            text=True,
            capture_output=True,
            timeout=timeout,
            check=False,
            env=self.environment(),
        )
        if check and result.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(map(str, arguments))}: {result.stderr or result.stdout}")
        return result.stdout

    def get(self, kind: str, name: str = "", namespace: str = "default", selector: str = "") -> dict[str, Any]:
        """One object, or a list with `items`."""
        chosen = [name] if name else []
        chosen += ["-l", selector] if selector else []
        return dict(json.loads(self.kubectl("get", kind, *chosen, "-n", namespace, "-o", "json")))

    def environment(self) -> dict[str, str]:
        return os.environ | {"KUBECONFIG": str(self.kubeconfig)}

    @property
    def nodes(self) -> list[str]:
        every = self.get("nodes")["items"]
        return sorted(n["metadata"]["name"] for n in every if fleet.LABEL not in n["metadata"].get("labels", {}))

    @property
    def expendable(self) -> list[str]:
        """Nodes that neither DNS nor an operator runs on."""
        every = self.get("nodes")["items"]
        return sorted(n["metadata"]["name"] for n in every if SYSTEM_LABEL not in n["metadata"].get("labels", {}))

    def is_ready(self, name: str) -> bool:
        conditions = self.get("node", name)["status"].get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
        host.wait(condition, what, seconds)

    def overlay(self, container: str = "trainer") -> dict[str, Any]:
        """What makes a pod here a trainer (`target.kubernetes.pod` in a run file)."""
        if self.is_box:
            return overlay.box_overlay(container)
        image, claim = os.environ.get(IMAGE_VARIABLE), os.environ.get(CLAIM_VARIABLE)
        if not (image and claim):
            pytest.skip(f"on a cluster of your own, {IMAGE_VARIABLE} and {CLAIM_VARIABLE} say what to train with")
        volume = {"name": "runs", "persistentVolumeClaim": {"claimName": claim}}
        mount = {"name": "runs", "mountPath": overlay.RUNS}
        return {"containers": [{"name": container, "image": image, "volumeMounts": [mount]}], "volumes": [volume]}

    @property
    def shell_image(self) -> str:
        """An image with a shell, nc and ping in it."""
        return TRAINER_IMAGE.removeprefix("docker.io/") if self.is_box else "busybox:1.37"

    def need_box(self, why: str) -> None:
        if not self.is_box:
            pytest.skip(f"needs the cluster in a box: {why}")

    # --- objects

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))

    @contextmanager
    def namespace(self, prefix: str = "test") -> Iterator[str]:
        """A namespace of its own, with the shared claim in it; gone afterwards with everything in it."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        self.kubectl("create", "namespace", name)
        try:
            if self.is_box:
                self.apply(*addons.shared_storage(name))
            yield name
        finally:
            # a namespace deletes its pods first, and the last pod of a Job that counts by index is held until there is
            # another or the Job is gone (Kubernetes 1.36): the Jobs go first, and what would make new ones before them
            makers = "trainjobs,jobsets,pytorchjobs,hyperpodpytorchjobs,jobs" if self.is_box else "jobs"
            self.kubectl("delete", makers, "--all", "-n", name, "--wait=false", check=False)
            self.kubectl("delete", "namespace", name, "--wait=false")
            if self.is_box:
                self.kubectl("delete", "persistentvolume", f"{CLAIM}-{name}", "--wait=false")

    def storage(self, namespace: str = "default") -> Path:
        """The shared claim of a namespace, as this machine sees it."""
        self.need_box("the shared folder is on this machine")
        return STORAGE / namespace

    # --- things that happen to clusters

    def kill_kubelet(self, name: str) -> None:
        """The node falls silent; its pods run on."""
        self.need_box("kills a kubelet")
        node.kill_kubelet(_node(name))

    def cut_power(self, name: str) -> None:
        """Everything on the node is gone at once."""
        self.need_box("ends every process of a node")
        node.cut_power(_node(name))

    def restart_node(self, name: str, seconds: float = 180) -> None:
        """Start what is not running, and wait until the node takes pods again."""
        self.need_box("starts a kubelet")
        if self.kubectl("get", "node", name, "--ignore-not-found") == "":  # forgotten: it must register anew
            node.kill_kubelet(_node(name))
        node.restart(_node(name))
        self.wait(
            lambda: self.kubectl("get", "node", name, "--ignore-not-found") != "" and self.is_ready(name),
            f"{name} is ready",
            seconds,
        )
        machine.label(Api(KUBECONFIG))
        self.kubectl("uncordon", name)

    def forget_node(self, name: str) -> None:
        """As a cloud does when a machine is gone: the node's object is deleted, and its pods with it."""
        self.need_box("deletes a node")
        self.kubectl("delete", "node", name, "--wait=false")
        for pod in self._pods_on(name):
            where = ("-n", pod["metadata"]["namespace"])
            self.kubectl("delete", "pod", pod["metadata"]["name"], *where, "--force", "--grace-period=0", check=False)

    def _pods_on(self, name: str) -> list[dict[str, Any]]:
        listing = self.kubectl("get", "pods", "-A", "--field-selector", f"spec.nodeName={name}", "-o", "json")
        return list(json.loads(listing)["items"])

    def drain(self, name: str, timeout: float = 300) -> None:
        self.need_box("drains a node")
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={timeout:.0f}s")
        self.kubectl("drain", name, *flags, timeout=timeout + 30)

    def uncordon(self, name: str) -> None:
        self.kubectl("uncordon", name)

    def set_capacity(self, name: str, **resources: int | None) -> None:
        """Pretend devices: set_capacity("node2", **{"nvidia.com/gpu": 8}); None takes them away."""
        self.need_box("pretends that nodes have devices")
        values = {key: None if value is None else str(value) for key, value in resources.items()}
        Api(KUBECONFIG).merge(f"/api/v1/nodes/{name}/status", {"status": {"capacity": values, "allocatable": values}})

    @contextmanager
    def fake_nodes(self, count: int, capacity: dict[str, str] | None = None) -> Iterator[list[str]]:
        """Nodes that are only objects. Lost nodes are not noticed meanwhile."""
        self.need_box("creates nodes that do not exist")
        with fleet.fake_nodes(count, capacity) as names:
            yield names

    def pretend_running(self, namespace: str, selector: str) -> int:
        return fleet.pretend_running(namespace, selector)

    @contextmanager
    def usual_timeouts(self) -> Iterator[None]:
        """A lost node is noticed as late as everywhere: after 50 s, which Kubernetes waits by default."""
        self.need_box("restarts the controllers")
        control.restart_controllers(usual_timeouts=True)
        try:
            yield
        finally:
            control.restart_controllers()

    def restart_api(self) -> None:
        """The API server goes away and comes back."""
        self.need_box("restarts the API server")
        host.end("kube-apiserver", signal.SIGKILL)
        control.start_api()
        control.wait_for_api()


def _node(name: str) -> Node:
    found = [one for one in NODES if one.name == name]
    if not found:
        raise LookupError(f"{name} is none of {[one.name for one in NODES]}")
    return found[0]


class Session:
    """The box of one test session: started when first asked for, gone when the session is."""

    def __init__(self) -> None:
        self.hold: keeper.Hold | None = None

    def start(self) -> None:
        if keeper.kept():
            print(f"using the box that is up ({ROOT})", file=sys.stderr)
            return
        self.hold = keeper.start()
        try:
            machine.up()
        except BaseException:
            self.stop()
            raise
        if os.environ.get("WINDLASS_BOX") == "keep":
            self.hold.keep()
            self.hold = None

    @property
    def owns(self) -> bool:
        """Whether this session started it, and so may end it."""
        return self.hold is not None

    def forget(self) -> None:
        """The keeper is gone: there is nobody to ask for its removal any more."""
        if self.hold is not None:
            self.hold.process.wait(timeout=60)
            os.close(self.hold.pipe)
            self.hold = None

    def stop(self) -> None:
        if self.hold is not None:
            self.hold.release()
            self.hold = None
