"""The control plane: etcd, the API server, the controllers and the scheduler, at the host's end of the bridge."""

from __future__ import annotations

from tests.cluster.box import certificates
from tests.cluster.box.api import Api
from tests.cluster.box.build import binary
from tests.cluster.box.host import end, spawn, wait
from tests.cluster.box.layout import API_PORT, HOST, KUBECONFIG, PODS, ROOT, SERVICES

PKI = certificates.FOLDER
LOG = ROOT / "log"
# A lost node is noticed after GRACE seconds and its pods are evicted EVICTION seconds later (usually 50 and 300): tests
# wait for it. A kubelet says every three seconds that it lives (node.py), so that a slow machine is not a lost node.
GRACE, EVICTION = 16, 4
# While nodes are pretended (no kubelet speaks for them) nobody may find them dead.
NODE_CARE = ("node-lifecycle-controller", "taint-eviction-controller", "pod-garbage-collector-controller")


ETCD = f"https://{HOST}:2379"


def start_storage() -> None:
    (ROOT / "etcd").mkdir()
    peers = f"http://{HOST}:2380"
    flags = {
        "name": "box",
        "data-dir": ROOT / "etcd",
        "unsafe-no-fsync": "true",
        "log-level": "warn",
        "listen-client-urls": ETCD,
        "advertise-client-urls": ETCD,
        "client-cert-auth": "true",
        "cert-file": PKI / "etcd.crt",
        "key-file": PKI / "etcd.key",
        "trusted-ca-file": PKI / "ca.crt",
        "listen-peer-urls": peers,
        "initial-advertise-peer-urls": peers,
        "initial-cluster": f"box={peers}",
    }
    spawn("etcd", "control", [binary("etcd"), *_flags(flags)])


def start_api() -> None:
    flags = {
        "etcd-servers": ETCD,
        "etcd-cafile": PKI / "ca.crt",
        "etcd-certfile": PKI / "etcd-client.crt",
        "etcd-keyfile": PKI / "etcd-client.key",
        "bind-address": HOST,
        "advertise-address": HOST,
        "secure-port": API_PORT,
        "tls-cert-file": PKI / "apiserver.crt",
        "tls-private-key-file": PKI / "apiserver.key",
        "client-ca-file": PKI / "ca.crt",
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": PKI / "sa.pub",
        "service-account-signing-key-file": PKI / "sa.key",
        "service-cluster-ip-range": SERVICES,
        "kubelet-client-certificate": PKI / "kubelet-client.crt",
        "kubelet-client-key": PKI / "kubelet-client.key",
        "kubelet-certificate-authority": PKI / "ca.crt",
        "kubelet-preferred-address-types": "InternalIP",
        "requestheader-client-ca-file": PKI / "ca.crt",
        "requestheader-allowed-names": "front-proxy",
        "requestheader-username-headers": "X-Remote-User",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "proxy-client-cert-file": PKI / "front-proxy-client.crt",
        "proxy-client-key-file": PKI / "front-proxy-client.key",
        "allow-privileged": "true",
        "enable-aggregator-routing": "true",  # it is outside the pod network's services: webhooks are called by pod
        "default-not-ready-toleration-seconds": EVICTION,
        "default-unreachable-toleration-seconds": EVICTION,
        "event-ttl": "2h",
    }
    spawn("kube-apiserver", "control", [binary("kube-apiserver"), *_flags(flags)])


def wait_for_api() -> Api:
    api = Api(KUBECONFIG)
    wait(api.ready, "the API server is ready", 180, [LOG / "kube-apiserver.log", LOG / "etcd.log"])
    return api


def start_controllers(*, without_node_care: bool = False, usual_timeouts: bool = False) -> None:
    controllers = "*" + "".join(f",-{name}" for name in NODE_CARE if without_node_care)
    flags = {
        "kubeconfig": certificates.kubeconfig(ROOT / "kubeconfig-controllers", "controllers"),
        "leader-elect": "false",
        "bind-address": HOST,
        "cert-dir": ROOT / "pki" / "controllers",
        "controllers": controllers,
        "service-account-private-key-file": PKI / "sa.key",
        "root-ca-file": PKI / "ca.crt",
        "cluster-signing-cert-file": PKI / "ca.crt",
        "cluster-signing-key-file": PKI / "ca.key",
        "use-service-account-credentials": "true",
        "cluster-cidr": PODS,
        **({} if usual_timeouts else {"node-monitor-period": "1s", "node-monitor-grace-period": f"{GRACE}s"}),
        "kube-api-qps": 200,
        "kube-api-burst": 400,
    }
    spawn("kube-controller-manager", "control", [binary("kube-controller-manager"), *_flags(flags)])


def restart_controllers(*, without_node_care: bool = False, usual_timeouts: bool = False) -> None:
    end("kube-controller-manager")
    start_controllers(without_node_care=without_node_care, usual_timeouts=usual_timeouts)


def start_scheduler() -> None:
    flags = {
        "kubeconfig": certificates.kubeconfig(ROOT / "kubeconfig-scheduler", "scheduler"),
        "leader-elect": "false",
        "bind-address": HOST,
        "cert-dir": ROOT / "pki" / "scheduler",
        "kube-api-qps": 200,
        "kube-api-burst": 400,
    }
    spawn("kube-scheduler", "control", [binary("kube-scheduler"), *_flags(flags)])


def _flags(settings: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]
