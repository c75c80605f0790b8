"""What AWS refuses, over HTTP as botocore meets it: said with a cause and a fix, and without account numbers."""

import pytest

from tests.clusters.conftest import REGION
from tests.kubernetes.api_server import Server

ACCOUNT = "210987654321"
WHO = f"arn:aws:sts::{ACCOUNT}:assumed-role/dev/ann"
DENIED = f"User: {WHO} is not authorized to perform: eks:DescribeCluster on resource: arn:aws:eks:{REGION}:{ACCOUNT}:*"


@pytest.fixture
def refusing(aws, monkeypatch):
    server = Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("status", "code", "message", "cause", "fix"),
    [
        (403, "AccessDeniedException", DENIED, "the role may not do that", "allow DescribeCluster to the role"),
        (403, "ExpiredTokenException", "token expired", "the credentials have expired", "aws sso login"),
        (403, "UnrecognizedClientException", "invalid", "the credentials have expired", "aws sso login"),
        (429, "ThrottlingException", "Rate exceeded", "has already waited", "again in a minute"),
    ],
)
def test_a_refusal_has_a_cause_and_a_fix(windlass, refusing, tmp_path, monkeypatch, status, code, message, cause, fix):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    refusal = {"__type": code, "message": message}
    refusing.on("/clusters/training", lambda handler: handler.json(refusal, status))
    answer = windlass("cluster", "use", "training")
    assert answer.code == 1
    assert f"AWS answers {code}" in answer.err
    assert cause in answer.err
    assert fix in answer.err
    assert ACCOUNT not in answer.out + answer.err
    assert len(refusing.requests) == (2 if status == 429 else 1)
    assert not (tmp_path / "kubeconfig").exists()


def test_a_region_that_does_not_answer(windlass, aws, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://eks.us-west-9.amazonaws.invalid")
    answer = windlass("cluster", "use", "training", "--region", "us-west-9")
    assert answer.code == 1
    assert "no such service in us-west-9" in answer.err
    assert "--region REGION" in answer.err
    answer = windlass("cluster", "use", "training", "--region", "west!")
    assert "--region REGION" in answer.err
