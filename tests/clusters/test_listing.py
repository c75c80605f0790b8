"""`windlass cluster ls` and `use` against moto's EKS and SageMaker, over HTTP."""

import base64
import json
import os
import stat
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests.clusters.conftest import REGION
from tests.kubernetes.api_server import Server

ROLE = "arn:aws:iam::123456789012:role/eks"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    return tmp_path


def make_eks(aws, name):
    network = {"subnetIds": ["subnet-1", "subnet-2"], "securityGroupIds": ["sg-1"]}
    return aws("eks").create_cluster(name=name, version="1.33", roleArn=ROLE, resourcesVpcConfig=network)["cluster"]


def test_clusters_and_contexts_are_listed_together(windlass, aws, home):
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


def test_without_credentials_contexts_are_listed_and_the_rest_is_said(windlass, aws, home, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    answer = json.loads(windlass("cluster", "ls", "--json").out)
    assert answer["clusters"] == []
    assert any("AWS does not know who you are" in warning for warning in answer["warnings"])


def test_use_writes_an_entry_and_leaves_the_others(windlass, aws, home):
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


def test_an_unknown_cluster_is_answered_with_those_there_are(windlass, aws, home):
    make_eks(aws, "training")
    answer = windlass("cluster", "use", "trainnig")
    assert answer.code == 2
    assert "windlass cluster use training" in answer.err
    assert not (home / ".kube" / "config").exists()


def test_the_token_is_a_signed_question_that_names_the_cluster(windlass, aws):
    credential = json.loads(windlass("cluster", "token", "training", "--region", REGION).out)
    text = credential["status"]["token"]
    assert text.startswith("k8s-aws-v1.")
    encoded = text.removeprefix("k8s-aws-v1.")
    url = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    query = parse_qs(urlsplit(url).query)
    assert query["Action"] == ["GetCallerIdentity"]
    assert "x-k8s-aws-id" in query["X-Amz-SignedHeaders"][0]


def test_contexts_of_several_files_are_merged_as_kubectl_does(windlass, home, monkeypatch):
    first = {
        "contexts": [{"name": "a", "context": {"cluster": "c"}}, {"context": {}}, {"name": "größe"}],
        "clusters": None,
    }
    second = {"current-context": "a", "clusters": [{"name": "c", "cluster": {"server": "https://c.example"}}, {}]}
    for name, value in (("one", first), ("two", second)):
        (home / name).write_text(yaml.safe_dump(value, allow_unicode=True))
    monkeypatch.setenv("KUBECONFIG", f"{home}/one{os.pathsep}{home}/none{os.pathsep}{home}/two")
    answer = windlass("cluster", "ls", "--no-aws", "--json")
    rows = [(row["name"], row["status"], row["is_current"]) for row in json.loads(answer.out)["clusters"]]
    assert rows == [("a", "https://c.example", True), ("größe", "no server", False)]


def test_a_linked_kubeconfig_stays_a_link_and_is_never_readable_by_others(windlass, aws, home, monkeypatch):
    make_eks(aws, "training")
    real, path, modes = home / "dotfiles", home / ".kube" / "config", []
    real.write_text(yaml.safe_dump({"users": [{"name": "größe", "user": {"token": "secret"}}]}, allow_unicode=True))
    path.parent.mkdir()
    path.symlink_to(real)
    monkeypatch.setattr(os, "fsync", lambda handle: modes.append(os.fstat(handle).st_mode))
    assert windlass("cluster", "use", "training").code == 0
    assert path.is_symlink()
    assert "größe" in real.read_text()
    assert {oct(stat.S_IMODE(mode)) for mode in modes if stat.S_ISREG(mode)} == {"0o600"}


def test_what_is_no_file_is_not_replaced_by_one(windlass, aws, home, monkeypatch):
    make_eks(aws, "training")
    os.mkfifo(home / "pipe")  # as KUBECONFIG=/dev/null
    monkeypatch.setenv("KUBECONFIG", str(home / "pipe"))
    answer = windlass("cluster", "use", "training")
    assert answer.code == 2
    assert "is no file" in answer.err
    assert stat.S_ISFIFO(os.stat(home / "pipe").st_mode)


def test_windlass_is_found_where_it_is_not_in_the_path(windlass, aws, home, monkeypatch):
    make_eks(aws, "training")
    monkeypatch.setenv("PATH", str(home))
    assert windlass("cluster", "use", "training").code == 0
    command = yaml.safe_load((home / ".kube" / "config").read_text())["users"][0]["user"]["exec"]["command"]
    assert Path(command).is_absolute()


def test_who_may_not_ask_sagemaker_is_still_told_which_clusters_there_are(windlass, aws, home, monkeypatch):
    make_eks(aws, "training")
    refusing = Server()
    refusing.on("/", lambda handler: handler.json({"__type": "AccessDeniedException", "message": "no"}, 400))
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", refusing.url)
    answer = windlass("cluster", "use", "trainnig")
    refusing.stop()
    assert "windlass cluster use training" in answer.err


@pytest.mark.parametrize("odd", ["contexts: {a: b}", "users: [1, 2]", "clusters: text"])
def test_use_leaves_a_file_that_is_no_kubeconfig_alone(windlass, aws, home, odd):
    make_eks(aws, "training")
    path = home / ".kube" / "config"
    path.parent.mkdir()
    path.write_text(odd)
    answer = windlass("cluster", "use", "training")
    assert answer.code == 2
    assert "no list of named things" in answer.err
    assert path.read_text() == odd
