"""What a bare cluster lacks: DNS, shared storage, a person who is not an administrator. Manifests as Python objects."""

from __future__ import annotations

from typing import Any

from tests.cluster.box.build import binary
from tests.cluster.box.images import SYSTEM_IMAGE
from tests.cluster.box.layout import CLAIM, DNS_SERVICE, DOMAIN, STORAGE, SYSTEM_LABEL

Object = dict[str, Any]


def program(name: str) -> tuple[Object, Object]:
    """A volume and its mount: one of the compiled programs, as /program. Saves an image per program."""
    source = {"path": str(binary(name)), "type": "File"}
    return (
        {"name": "program", "hostPath": source},
        {"name": "program", "mountPath": "/program", "readOnly": True},
    )


def on_system_node() -> Object:
    """Where pods of the system run, which tests neither drain nor kill, and at once even if it is busy."""
    return {
        "nodeSelector": {SYSTEM_LABEL: "true"},
        "priorityClassName": "system-cluster-critical",
        "tolerations": [{"operator": "Exists"}],
    }


def metadata(name: str, namespace: str | None = None, **more: Any) -> Object:
    return {"name": name} | ({"namespace": namespace} if namespace else {}) | more


def dns() -> list[Object]:
    volume, mount = program("coredns")
    labels = {"k8s-app": "kube-dns"}
    corefile = (
        f".:1053 {{\n  errors\n  ready :8181\n"
        f"  kubernetes {DOMAIN} in-addr.arpa {{\n    ttl 1\n  }}\n  cache 1\n}}\n"  # a pod that moved is found at once
    )
    container = {
        "name": "coredns",
        "image": SYSTEM_IMAGE,
        "command": ["/program", "-conf", "/etc/coredns/Corefile"],
        "volumeMounts": [mount, {"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
        "ports": [{"containerPort": 1053, "protocol": "UDP"}, {"containerPort": 1053, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
    }
    pod = {
        "serviceAccountName": "coredns",
        "dnsPolicy": "Default",
        "containers": [container],
        "volumes": [volume, {"name": "config", "configMap": {"name": "coredns"}}],
        **on_system_node(),
    }
    reads = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    ports = [{"name": kind.lower(), "port": 53, "targetPort": 1053, "protocol": kind} for kind in ("UDP", "TCP")]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata("coredns", "kube-system")},
        _cluster_role("coredns", reads),
        _binding("coredns", "coredns", {"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata("coredns", "kube-system"),
            "data": {"Corefile": corefile},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata("coredns", "kube-system"),
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata("kube-dns", "kube-system"),
            "spec": {"clusterIP": DNS_SERVICE, "selector": labels, "ports": ports},
        },
    ]


def shared_storage(namespace: str) -> list[Object]:
    """A claim that pods on every node can write at once: the nodes are one machine, so a folder of it will do."""
    volume = f"{CLAIM}-{namespace}"
    shape = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": metadata(volume),
            "spec": shape
            | {
                "capacity": {"storage": "50Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(STORAGE / namespace), "type": "DirectoryOrCreate"},
                "claimRef": {"namespace": namespace, "name": CLAIM},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata(CLAIM, namespace),
            "spec": shape | {"volumeName": volume, "resources": {"requests": {"storage": "50Gi"}}},
        },
    ]


def people() -> list[Object]:
    """The group `developers` may edit in `default`, and is nobody elsewhere."""
    subject = {"kind": "Group", "name": "developers", "apiGroup": "rbac.authorization.k8s.io"}
    proxy = {"kind": "User", "name": "system:kube-proxy", "apiGroup": "rbac.authorization.k8s.io"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"}
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata("developers-edit", "default"),
            "roleRef": role,
            "subjects": [subject],
        },
        _binding("windlass-box-proxy", "system:node-proxier", proxy),
    ]


def _cluster_role(name: str, rules: list[Object]) -> Object:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": metadata(name),
        "rules": rules,
    }


def _binding(name: str, role: str, subject: Object) -> Object:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": metadata(name),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [subject],
    }
