"""`windlass cluster shell`: which way leads to a node, and what is said where none does."""

import json
import os

import pytest

from tests.clusters.conftest import node
from tests.kubernetes.api_server import Server
from windlass.clusters.shell import EC2_NODE


@pytest.fixture
def one_node(cluster):
    value = node("a")
    cluster.objects["nodes"] = [value]
    cluster.serve()
    cluster.server.on("/api/v1/nodes/a", lambda handler: handler.json(value))
    return value


def test_a_node_outside_aws_needs_a_pod(windlass, one_node):
    answer = windlass("cluster", "shell", "a")
    assert answer.code == 2
    assert "windlass cluster shell a --debug-pod IMAGE" in answer.err


def test_without_the_plugin(windlass, one_node, monkeypatch, tmp_path):
    one_node["spec"]["providerID"] = "aws:///us-west-2a/i-0123456789abcdef0"
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = windlass("cluster", "shell", "a")
    assert "session-manager-plugin is not installed" in answer.err


def test_an_unknown_node_is_answered_with_those_there_are(windlass, one_node):
    answer = windlass("cluster", "shell", "b")
    assert "nodes: a" in answer.err
    assert "windlass cluster shell a" in answer.err


def test_a_pod_that_cannot_start_is_deleted_again(windlass, cluster, one_node):
    pods, made = "/api/v1/namespaces/team/pods", []

    def create(handler):
        value = json.loads(handler.body)
        made.append(value)
        status = {"phase": "Failed", "message": "Pod was rejected: NodeAffinity"}
        path = f"{pods}/{value['metadata']['name']}"
        cluster.server.on(path, lambda one: one.json({**value, "status": status}))
        handler.json(value, 201)

    cluster.server.on(pods, create)
    answer = windlass("cluster", "shell", "a", "--debug-pod", "busybox")
    assert "NodeAffinity" in answer.err
    spec = made[0]["spec"]
    assert (spec["nodeName"], spec["hostPID"]) == ("a", True)
    deleted = [path for verb, path, _ in cluster.server.requests if verb == "DELETE"]
    assert deleted == [f"{pods}/{made[0]['metadata']['name']}"]


@pytest.mark.parametrize("zone", ["us-west-2a", "us-west-2-lax-1a"])  # a local zone belongs to a region too
def test_the_region_of_a_node(zone):
    assert EC2_NODE.match(f"aws:///{zone}/i-0123456789abcdef0")["region"] == "us-west-2"


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Stands in for AWS' plugin: writes down what it is started with."""
    path = tmp_path / "bin" / "session-manager-plugin"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nfor argument; do echo "$argument"; done > {tmp_path}/arguments\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return tmp_path / "arguments"


def aws_server(monkeypatch, **answers):
    """SageMaker and SSM, as far as a session needs them: moto has neither sessions nor nodes of a HyperPod cluster."""
    server, requests = Server(), []

    def answer(handler):
        operation = handler.headers["X-Amz-Target"].rpartition(".")[2]
        request = json.loads(handler.body)
        requests.append((operation, request))
        reply = answers[operation]
        status, value = reply(request) if callable(reply) else (200, reply)
        handler.json(value, status)

    server.on("/", answer)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    return requests


def test_a_hyperpod_node_is_found_in_its_cluster(windlass, cluster, aws, plugin, monkeypatch):
    value = node("hyperpod-i-0123456789abcdef0")
    value["metadata"]["labels"]["topology.kubernetes.io/region"] = "us-east-2"
    cluster.objects["nodes"] = [value]
    cluster.serve()
    cluster.server.on("/api/v1/nodes/hyperpod-i-0123456789abcdef0", lambda handler: handler.json(value))
    arn = "arn:aws:sagemaker:us-east-2:123456789012:cluster"
    clusters = [{"ClusterName": name, "ClusterArn": f"{arn}/{name}id"} for name in ("other", "big")]

    def describe(request):
        if request["ClusterName"] == "other":
            return 400, {"__type": "ValidationException", "message": "no node i-0123456789abcdef0"}
        return 200, {"NodeDetails": {"InstanceGroupName": "workers"}}

    requests = aws_server(
        monkeypatch,
        ListClusters={"ClusterSummaries": clusters},
        DescribeClusterNode=describe,
        StartSession={"SessionId": "s", "TokenValue": "t", "StreamUrl": "wss://s"},
    )
    assert windlass("cluster", "shell", "hyperpod-i-0123456789abcdef0").code == 0
    target = {"Target": "sagemaker-cluster:bigid_workers-i-0123456789abcdef0"}
    assert requests[-1] == ("StartSession", target)
    said = plugin.read_text().splitlines()
    assert json.loads(said[0])["SessionId"] == "s"
    assert (said[1], said[2], json.loads(said[4])) == ("us-east-2", "StartSession", target)
