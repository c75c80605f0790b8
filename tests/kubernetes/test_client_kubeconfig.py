"""Kubeconfig files, as kubectl reads them."""

import json

import pytest

from tests.kubernetes.api_server import write_kubeconfig
from windlass.errors import UserError
from windlass.targets.kubernetes import kubeconfig
from windlass.targets.kubernetes.credentials import Credentials, run_plugin, tls
from windlass.targets.kubernetes.kubeconfig import access


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = write_kubeconfig(tmp_path / "config", "https://one:6443", {"token": "t"})
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


def test_the_current_context(file):
    found = access()
    assert (found.context, found.namespace, found.server) == ("here", "team", "https://one:6443")
    assert access(namespace="other").namespace == "other"
    assert "token" not in repr(found).replace("token=", "")


def test_several_files_are_merged_and_the_first_wins(file, tmp_path, monkeypatch):
    second = tmp_path / "second"
    second.write_text(
        json.dumps(
            {
                "current-context": "there",
                "contexts": [
                    {"name": "there", "context": {"cluster": "d"}},
                    {"name": "here", "context": {"cluster": "d", "namespace": "hidden"}},
                ],
                "clusters": [{"name": "d", "cluster": {"server": "https://two:6443"}}],
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'missing'}:{file}:{second}")
    assert (access().context, access().namespace) == ("here", "team")
    assert (access("there").server, access("there").namespace) == ("https://two:6443", "default")


def test_a_wrong_context_gets_the_nearest(file):
    with pytest.raises(UserError) as error:
        access("hree")
    assert "there is no context 'hree'" in error.value.what
    assert error.value.evidence == "contexts there: here"
    assert error.value.fix.startswith("--on kubernetes:here")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "is no kubeconfig"),
        ("contexts: [{name: a, context: {cluster: b}}]\ncurrent-context: a", "names the cluster 'b'"),
        ("contexts: []", "no context is chosen"),
    ],
)
def test_broken_files(file, text, words):
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        access()


def test_no_file_at_all(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    monkeypatch.setattr(kubeconfig, "SERVICE_ACCOUNT", tmp_path)
    with pytest.raises(UserError, match="no Kubernetes cluster is configured") as error:
        access()
    assert "update-kubeconfig" in error.value.fix


def test_in_a_pod_its_service_account_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    monkeypatch.setattr(kubeconfig, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("mine")
    found = access()
    assert (found.server, found.namespace, found.context) == ("https://[fd00::1]:443", "mine", "in-cluster")


def test_a_plugin_that_is_missing_or_fails(tmp_path, monkeypatch):
    entry = {"command": "no-such-plugin", "installHint": "brew install it"}
    path = write_kubeconfig(tmp_path / "config", "https://one", {"exec": entry})
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(UserError, match=r"no-such-plugin .* is not installed") as error:
        run_plugin(access())
    assert error.value.fix == "brew install it"
    plugin = tmp_path / "aws"
    plugin.write_text("#!/bin/sh\necho 'The SSO session has expired' >&2\nexit 1\n")
    plugin.chmod(0o755)
    write_kubeconfig(path, "https://one", {"exec": {"command": str(plugin)}})
    with pytest.raises(UserError, match="gave no credentials") as error:
        run_plugin(access())
    assert "SSO session" in error.value.evidence
    assert "aws sso login" in error.value.fix
    plugin.write_text("#!/bin/sh\necho nonsense\n")
    with pytest.raises(UserError, match="ExecCredential"):
        run_plugin(access())


def test_certificates_that_are_none(tmp_path, monkeypatch):
    path = write_kubeconfig(tmp_path / "config", "https://one", **{"certificate-authority-data": "bm9uZQ=="})
    monkeypatch.setenv("KUBECONFIG", str(path))
    found = access()
    with pytest.raises(UserError, match="certificates of the context here"):
        tls(found, Credentials(found))
