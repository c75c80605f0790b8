"""One node: network, host name and mounts of its own, and in them containerd, a kubelet and kube-proxy."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import yaml

from tests.cluster.box import certificates, host
from tests.cluster.box.build import binary
from tests.cluster.box.host import BoxError, run, spawn, wait
from tests.cluster.box.layout import BRIDGE, DNS_SERVICE, DOMAIN, HOST, NAME, NODES, PAUSE_IMAGE, PODS, ROOT, Node

LOG = ROOT / "log"
CNI_PLUGINS = Path("/usr/lib/cni")
HEARTBEAT = 3


def make(node: Node) -> None:
    """Its namespaces, held by a process that sleeps, and its cable to the bridge."""
    for name in ("containerd", "kubelet", "cni", "pods", "upper", "work", "state"):
        (node.folder / name).mkdir(parents=True)
    (node.folder / "hosts").write_text(f"127.0.0.1 localhost\n{node.address} {node.name}\n")
    (node.folder / "resolv.conf").write_text("")
    # Private first, then shared among the node's own: nothing a node mounts is seen by the machine, and all of it is
    # gone with its last process. What programs put below /var and /run goes to the node's own copies.
    steps = [
        "mount --make-rshared /",
        f"mount -t overlay overlay -o lowerdir=/var,upperdir={node.folder}/upper,workdir={node.folder}/work /var",
        "mount -t tmpfs -o mode=755 tmpfs /run",
        f"mount --bind {node.folder}/hosts /etc/hosts",
        f"hostname {node.name}",
        "ip link set lo up",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        f": > {node.folder}/made",
        "exec sleep infinity",
    ]
    unshare = ["unshare", "--net", "--uts", "--mount", "--propagation", "private"]
    pid = spawn(f"holder-{node.name}", "control", [*unshare, "sh", "-c", " && ".join(steps)])
    wait((node.folder / "made").exists, f"namespaces of {node.name}", 60, [LOG / f"holder-{node.name}.log"])
    run("ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "link", "set", node.link, "master", BRIDGE, "up")
    run("ip", "route", "replace", node.pods, "via", node.address, "dev", BRIDGE)
    inside = ["nsenter", "-t", str(pid), "-n", "ip"]
    run(*inside, "address", "add", f"{node.address}/24", "dev", "eth0")
    run(*inside, "link", "set", "eth0", "up")
    run(*inside, "route", "add", "default", "via", HOST)
    run(*inside, "route", "add", "unreachable", "169.254.0.0/16")  # no cloud's metadata from here
    for other in NODES:
        if other != node:
            run(*inside, "route", "add", other.pods, "via", other.address)


def start_containerd(node: Node, images: Path | None = None) -> None:
    (node.folder / "cni" / "10-pods.conflist").write_text(json.dumps(_network(node)))
    (node.folder / "containerd.toml").write_text(_containerd(node))
    _inside(node, "containerd", [binary("containerd"), "-c", node.folder / "containerd.toml"])
    ctr = [str(binary("ctr")), "--address", str(node.socket), "--namespace", "k8s.io"]

    def answers() -> bool:
        try:
            run(*ctr, "version")
        except BoxError:
            return False
        return True

    wait(answers, f"containerd of {node.name}", 60, [LOG / f"containerd-{node.name}.log"])
    if images is not None:
        run(*ctr, "images", "import", "--local", images, timeout=300)


def start_kubelet(node: Node) -> None:
    certificates.kubeconfig(node.folder / "kubeconfig", node.name)
    (node.folder / "kubelet.yaml").write_text(yaml.safe_dump(_kubelet(node)))
    flags = {
        "config": node.folder / "kubelet.yaml",
        "kubeconfig": node.folder / "kubeconfig",
        "root-dir": node.folder / "kubelet",
        "hostname-override": node.name,
        "node-ip": node.address,
    }
    _inside(node, "kubelet", [binary("kubelet"), *(f"--{name}={value}" for name, value in flags.items())])


def start_proxy(node: Node) -> None:
    certificates.kubeconfig(node.folder / "kubeconfig-proxy", "proxy")
    settings = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{node.folder}/kubeconfig-proxy"},
        "mode": "iptables",
        "clusterCIDR": PODS,
        "hostnameOverride": node.name,
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"minSyncPeriod": "0s"},
        "metricsBindAddress": "127.0.0.1:10249",
    }
    (node.folder / "proxy.yaml").write_text(yaml.safe_dump(settings))
    _inside(node, "kube-proxy", [binary("kube-proxy"), f"--config={node.folder}/proxy.yaml"])


def kill_kubelet(node: Node) -> None:
    """The node falls silent; its pods run on, as they do when a kubelet hangs."""
    host.end(f"kubelet-{node.name}", signal.SIGKILL)


def cut_power(node: Node) -> None:
    """Kubelet, containerd and every pod of the node, at once. Its cable and its disk stay."""
    host.kill_group(node.name)


def restart(node: Node) -> None:
    """Start again whatever of the node is not running."""
    if host.pid_of(f"containerd-{node.name}") is None:
        start_containerd(node)
    if host.pid_of(f"kubelet-{node.name}") is None:
        start_kubelet(node)
    if host.pid_of(f"kube-proxy-{node.name}") is None:
        start_proxy(node)


def _inside(node: Node, program: str, command: list[str | Path]) -> None:
    holder = host.pid_of(f"holder-{node.name}")
    if holder is None:
        raise BoxError(f"{node.name} is not there: {(LOG / f'holder-{node.name}.log').read_text()[-500:]}")
    # nsenter, not `ip netns exec`, which hides the control groups behind a fresh /sys
    enter: list[str | Path] = ["nsenter", "-t", str(holder), "-m", "-n", "-u"]
    path = f"{binary('containerd').parent}:{host.SEARCH_PATH}"  # containerd looks for its shim there
    spawn(f"{program}-{node.name}", f"{node.name}/daemons", [*enter, *command], {"PATH": path})


def _network(node: Node) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": f"{node.folder}/state/addresses",
        "ranges": [[{"subnet": node.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipMasq": False}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge | {"ipam": addresses}]}


def _containerd(node: Node) -> str:
    return f"""\
version = 3
root = "{node.folder}/containerd"
state = "{node.folder}/state/containerd"
oom_score = 0
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.blockfile"]
[grpc]
  address = "{node.socket}"
[ttrpc]
  address = "{node.socket}.ttrpc"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  disable_apparmor = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{CNI_PLUGINS}"]
    conf_dir = "{node.folder}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
      Root = "{node.folder}/state/runc"
"""


def _kubelet(node: Node) -> dict[str, object]:
    pki = certificates.FOLDER
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": f"{pki}/ca.crt"}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/{node.name}.crt",
        "tlsPrivateKeyFile": f"{pki}/{node.name}.key",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{NAME}/{node.name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        # what a container without CAP_SYS_RESOURCE may ask for
        "maxOpenFiles": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "oomScoreAdj": 0,
        "podLogsDir": f"{node.folder}/pods",
        "volumePluginDir": f"{node.folder}/state/plugins",
        "resolvConf": f"{node.folder}/resolv.conf",
        "clusterDomain": DOMAIN,
        "clusterDNS": [DNS_SERVICE],
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": f"{HEARTBEAT}s",
        "nodeLeaseDurationSeconds": 4 * HEARTBEAT,  # a kubelet renews four times as often
        "syncFrequency": "5s",
        "serializeImagePulls": False,
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
        "maxPods": 60,
        "registerWithTaints": [],
        "nodeStatusReportFrequency": "10s",
        "systemReserved": {"memory": f"{_reserved_mib()}Mi"},
    }


def _reserved_mib() -> int:
    """Every node believes that it has the whole machine; this leaves each an equal share of the memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return total * (len(NODES) - 1) // len(NODES)
