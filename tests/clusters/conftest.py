"""A cluster over HTTP whose objects a test plants, and AWS as moto's server plays it."""

import json
import urllib.request

import pytest

from tests.kubernetes.api_server import Server, write_kubeconfig

REGION = "us-west-2"
GROUPS = {
    "apps": ["v1"],
    "batch": ["v1"],
    "storage.k8s.io": ["v1"],
    "kubeflow.org": ["v1"],
    "kueue.x-k8s.io": ["v1beta1"],
}
LISTS = {
    "nodes": "/api/v1/nodes",
    "pods": "/api/v1/pods",
    "daemonsets": "/apis/apps/v1/daemonsets",
    "deployments": "/apis/apps/v1/deployments",
    "storage_classes": "/apis/storage.k8s.io/v1/storageclasses",
    "csi_drivers": "/apis/storage.k8s.io/v1/csidrivers",
    "claims": "/api/v1/namespaces/team/persistentvolumeclaims",
    "quotas": "/api/v1/namespaces/team/resourcequotas",
    "service_accounts": "/api/v1/namespaces/team/serviceaccounts",
    "local_queues": "/apis/kueue.x-k8s.io/v1beta1/namespaces/team/localqueues",
    "cluster_queues": "/apis/kueue.x-k8s.io/v1beta1/clusterqueues",
}


def node(name, *, gpus=8, efa=32, instance="p5.48xlarge", ready="True", driver="570.86.15", **spec):
    labels = {"node.kubernetes.io/instance-type": instance, "topology.kubernetes.io/zone": "us-west-2a"}
    if driver:
        labels["nvidia.com/cuda.driver-version.full"] = driver
    allocatable = {"cpu": "190", "memory": "2000Gi", "pods": "100", "nvidia.com/gpu": str(gpus)}
    allocatable["vpc.amazonaws.com/efa"] = str(efa)
    conditions = [{"type": "Ready", "status": ready, "message": "kubelet stopped posting node status"}]
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": {"allocatable": allocatable, "conditions": conditions},
    }


def named(name, namespace=None, **parts):
    return {"metadata": {"name": name, **({"namespace": namespace} if namespace else {})}, **parts}


def daemonset(name, wanted=2, ready=2):
    return named(name, "kube-system", status={"desiredNumberScheduled": wanted, "numberReady": ready})


class Cluster:
    """What the server answers: a sound cluster with two p5 nodes, until a test changes it."""

    def __init__(self, server):
        self.server = server
        self.version = {"major": "1", "minor": "33+", "gitVersion": "v1.33.2-eks"}
        self.groups = dict(GROUPS)
        self.kubeflow = [{"name": "pytorchjobs", "kind": "PyTorchJob"}]  # kinds of kubeflow.org
        self.namespace = {"metadata": {"name": "team", "labels": {}}, "status": {"phase": "Active"}}
        self.forbidden = set()  # (verb, resource) that this user may not
        self.has_other_rules = False  # of an authorizer that lists none, as EKS' access entries
        self.refused = {}  # list -> message of a 403
        self.image = lambda handler: handler.json({"config": {}})  # what its address answers as a registry
        self.secrets = {}  # of the namespace
        active = {"conditions": [{"type": "Active", "status": "True"}]}
        amounts = {"nvidia.com/gpu": "16", "vpc.amazonaws.com/efa": "64", "cpu": "1k", "memory": "8Ti"}
        quota = [{"name": name, "nominalQuota": amount} for name, amount in amounts.items()]
        flavors = [{"name": "p5", "resources": quota}]
        self.objects = {
            "nodes": [node("a"), node("b")],
            "pods": [],
            "daemonsets": [daemonset("nvidia-device-plugin-daemonset"), daemonset("aws-efa-k8s-device-plugin")],
            "deployments": [
                named("training-operator", "kubeflow", spec={"replicas": 1}, status={"readyReplicas": 1}),
            ],
            "storage_classes": [named("fsx", provisioner="fsx.csi.aws.com")],
            "csi_drivers": [named("fsx.csi.aws.com")],
            "claims": [named("work", spec={"accessModes": ["ReadWriteMany"]}, status={"phase": "Bound"})],
            "quotas": [],
            "service_accounts": [named("default"), named("trainer")],
            "local_queues": [named("main", spec={"clusterQueue": "all"}, status=active)],
            "cluster_queues": [named("all", spec={"resourceGroups": [{"flavors": flavors}]}, status=active)],
        }

    def serve(self):
        served = self.server.on
        groups = [
            {
                "name": name,
                "versions": [{"groupVersion": f"{name}/{version}", "version": version} for version in versions],
                "preferredVersion": {"groupVersion": f"{name}/{versions[0]}", "version": versions[0]},
            }
            for name, versions in self.groups.items()
        ]
        served("/apis", lambda handler: handler.json({"groups": groups}))
        served("/version", lambda handler: handler.json(self.version))
        for name, versions in self.groups.items():
            kinds = self.kubeflow if name == "kubeflow.org" else []
            for version in versions:
                served(f"/apis/{name}/{version}", lambda handler, kinds=kinds: handler.json({"resources": kinds}))
        if self.namespace:
            served("/api/v1/namespaces/team", lambda handler: handler.json(self.namespace))
        served("/v2/train/manifests/2.9-cuda12.8", lambda handler: self.image(handler))
        for name, value in self.secrets.items():
            served(f"/api/v1/namespaces/team/secrets/{name}", lambda handler, value=value: handler.json(value))
        for name, path in LISTS.items():
            served(path, lambda handler, name=name: self._list(handler, name))
        served("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review)
        served("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", self._rules)

    def _list(self, handler, name):
        if name in self.refused:
            handler.status(403, "Forbidden", self.refused[name])
            return
        start, size = int(handler.params.get("continue") or 0), int(handler.params.get("limit") or 250)
        page = self.objects[name][start : start + size]
        further = str(start + size) if start + size < len(self.objects[name]) else ""
        handler.json({"metadata": {"continue": further}, "items": page})

    def _rules(self, handler):
        every = [] if self.has_other_rules else {"list", "get", "watch", "create", "delete"}
        places = [
            ("", place) for place in ("secrets", "configmaps", "services", "pods", "pods/log", "pods/exec", "events")
        ]
        places += [("kubeflow.org", "pytorchjobs"), ("batch", "jobs")]
        places += [("trainer.kubeflow.org", "trainjobs"), ("sagemaker.amazonaws.com", "hyperpodpytorchjobs")]
        rules = [
            {
                "verbs": sorted(verb for verb in every if (verb, resource) not in self.forbidden),
                "apiGroups": [group],
                "resources": [resource],
            }
            for group, resource in places
        ]
        rules.append({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "resourceNames": ["one-of-them"]})
        handler.json({"status": {"resourceRules": rules, "incomplete": self.has_other_rules}}, 201)

    def _review(self, handler):
        asked = json.loads(handler.body)["spec"]["resourceAttributes"]
        verb = (asked["verb"], asked["resource"] + (f"/{asked['subresource']}" if asked["subresource"] else ""))
        is_allowed = not self.forbidden if verb == ("*", "*") else verb not in self.forbidden
        handler.json({"status": {"allowed": is_allowed, "reason": "" if is_allowed else "no RBAC rule"}}, 201)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    server = Server()
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", server.url, {"token": "t"})))
    yield Cluster(server)
    server.stop()


@pytest.fixture(scope="session")
def moto():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(moto, monkeypatch):
    """Makes boto3 clients of an empty account; the environment of this process leads to it too."""
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_ENDPOINT_URL": moto}
    for name, value in {**keys, "AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it remembers the credentials of the test before
    urllib.request.urlopen(urllib.request.Request(f"{moto}/moto-api/reset", method="POST")).close()
    return lambda service: boto3.client(service, region_name=REGION)
