"""Names, addresses and folders of a box."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Names and addresses are fixed, so that what a killed box left can be found. Whoever needs two at once numbers them.
INDEX = int(os.environ.get("WINDLASS_BOX_INDEX", "0"))
NAME = f"windlass-box{INDEX or ''}"
ROOT = Path("/tmp") / NAME  # short: sockets live below it, and their paths may have 107 characters
LOCK = Path("/run") / f"{NAME}.lock"
STORAGE = ROOT / "storage"  # what pods on every node share

BRIDGE = f"wlbox{INDEX}"
HOST = f"10.98.{INDEX}.1"  # the control plane, at the host's end of the bridge
PODS = f"10.246.{16 * INDEX}.0/20"
SERVICES = f"10.97.{16 * INDEX}.0/20"
API_SERVICE = f"10.97.{16 * INDEX}.1"
DNS_SERVICE = f"10.97.{16 * INDEX}.10"
DOMAIN = "cluster.local"
API_PORT = 6443
API = f"https://{HOST}:{API_PORT}"

KUBECONFIG = ROOT / "kubeconfig"
DEVELOPER_KUBECONFIG = ROOT / "kubeconfig-developer"  # a person who may do what `edit` allows in one namespace
CLAIM = "windlass-runs"
TRAINER_IMAGE = "docker.io/windlass/trainer:box"
PAUSE_IMAGE = "docker.io/windlass/pause:box"
SYSTEM_LABEL = "windlass.test/system"  # the node that DNS and operators run on, which tests leave alone


@dataclass(frozen=True)
class Node:
    number: int

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return f"10.98.{INDEX}.{10 + self.number}"

    @property
    def pods(self) -> str:
        return f"10.246.{16 * INDEX + self.number}.0/24"

    @property
    def link(self) -> str:
        """The host's end of its cable."""
        return f"{BRIDGE}-n{self.number}"

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"


NODES = tuple(Node(number) for number in (1, 2, 3))
