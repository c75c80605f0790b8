"""`windlass cluster ls` and `use` against moto's EKS and SageMaker, over HTTP."""

import base64
import json
import os
import stat
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests.cli.conftest import windlass  # noqa: F401
from tests.clusters.conftest import REGION

ROLE = "arn:aws:iam::123456789012:role/eks"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    return tmp_path


def make_eks(aws, name):
    network = {"subnetIds": ["subnet-1", "subnet-2"], "securityGroupIds": ["sg-1"]}
    return aws("eks").create_cluster(name=name, version="1.33", roleArn=ROLE, resourcesVpcConfig=network)["cluster"]


def test_clusters_and_contexts_are_listed_together(windlass, aws, home):  # noqa: F811
    make_eks(aws, "training")
    (home / ".kube").mkdir()
    config = {
        "current-context": "old",
        "contexts": [{"name": "old", "context": {"cluster": "c"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://old.example"}}],
    }
    (home / ".kube" / "config").write_text(yaml.safe_dump(config))
    answer = json.loads(windlass("cluster", "ls", "--json").out)
    rows = {row["name"]: row for row in answer["clusters"]}
    assert (rows["training"]["kind"], rows["training"]["status"], rows["training"]["version"]) == (
        "eks",
        "ACTIVE",
        "1.33",
    )
    assert (rows["old"]["kind"], rows["old"]["status"], rows["old"]["is_current"]) == (
        "context",
        "https://old.example",
        True,
    )


def test_without_credentials_contexts_are_listed_and_the_rest_is_said(windlass, aws, home, monkeypatch):  # noqa: F811
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    answer = json.loads(windlass("cluster", "ls", "--json").out)
    assert answer["clusters"] == []
    assert any("AWS does not know who you are" in warning for warning in answer["warnings"])


def test_use_writes_an_entry_and_leaves_the_others(windlass, aws, home):  # noqa: F811
    made = make_eks(aws, "training")
    path = home / ".kube" / "config"
    path.parent.mkdir()
    other = {"name": "other", "context": {"cluster": "x", "user": "y"}}
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "current-context": "other", "contexts": [other], "my": "own"}))
    for _ in range(2):  # a second time changes nothing
        answer = windlass("cluster", "use", "training", "--alias", "train", "-n", "team")
        assert answer.code == 0, answer.err
    config = yaml.safe_load(path.read_text())
    assert config["current-context"] == "train"
    assert config["my"] == "own"
    assert [entry["name"] for entry in config["contexts"]] == ["other", "train"]
    assert config["contexts"][0] == other
    assert config["contexts"][1]["context"]["namespace"] == "team"
    assert config["clusters"][0]["cluster"]["server"] == made["endpoint"]
    assert config["users"][0]["user"]["exec"]["args"] == ["cluster", "token", "training", "--region", REGION]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_an_unknown_cluster_is_answered_with_those_there_are(windlass, aws, home):  # noqa: F811
    make_eks(aws, "training")
    answer = windlass("cluster", "use", "trainnig")
    assert answer.code == 2
    assert "windlass cluster use training" in answer.err
    assert not (home / ".kube" / "config").exists()


def test_the_token_is_a_signed_question_that_names_the_cluster(windlass, aws):  # noqa: F811
    credential = json.loads(windlass("cluster", "token", "training", "--region", REGION).out)
    text = credential["status"]["token"]
    assert text.startswith("k8s-aws-v1.")
    encoded = text.removeprefix("k8s-aws-v1.")
    url = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    query = parse_qs(urlsplit(url).query)
    assert query["Action"] == ["GetCallerIdentity"]
    assert "x-k8s-aws-id" in query["X-Amz-SignedHeaders"][0]
