"""`windlass cluster fix` over HTTP: shows, creates, checks again, undoes; never touches what it did not make."""

import json
import os
from dataclasses import replace

import pytest
import yaml

from tests.clusters.conftest import LISTS, named
from tests.clusters.test_check import RUN
from windlass.clusters.fixing import FIX_LABEL
from windlass.clusters.helm import CHARTS

RBAC = "/apis/rbac.authorization.k8s.io/v1"
KINDS = {
    "/api/v1": {
        "Namespace": "namespaces",
        "ServiceAccount": "serviceaccounts",
        "ConfigMap": "configmaps",
        "PersistentVolumeClaim": "persistentvolumeclaims",
    },
    "/apis/scheduling.k8s.io/v1": {"PriorityClass": "priorityclasses"},
    RBAC: {"Role": "roles", "RoleBinding": "rolebindings"},
}


@pytest.fixture
def keeping(cluster):
    """The cluster, which also keeps what is created: objects by path."""
    kept = {}

    def collection(path, listed=None):
        def answer(handler):
            if handler.command == "POST":
                value = json.loads(handler.body)
                name = value["metadata"]["name"]
                there = {other["metadata"]["name"] for other in cluster.objects.get(listed, [])}
                if name in there or f"{path}/{name}" in kept:
                    handler.status(409, "AlreadyExists", f"{name} already exists")
                    return
                kept[f"{path}/{name}"] = value
                cluster.server.on(f"{path}/{name}", lambda one: single(one, f"{path}/{name}"))
                handler.json(value, 201)
            else:
                mine = [value for key, value in kept.items() if key.rpartition("/")[0] == path]
                values = mine + cluster.objects.get(listed, [])
                label = handler.params.get("labelSelector", "").partition("=")[0]
                chosen = [value for value in values if not label or label in value["metadata"].get("labels", {})]
                handler.json({"metadata": {}, "items": chosen})

        cluster.server.on(path, answer)

    def single(handler, path):
        if path not in kept:
            handler.status(404, "NotFound", "not there")
        elif handler.command == "DELETE":
            handler.json(kept.pop(path))
        else:
            handler.json(kept[path])

    def serve():
        cluster.serve()
        collection(LISTS["service_accounts"], "service_accounts")
        collection("/api/v1/namespaces/team/persistentvolumeclaims", "claims")
        for plural in ("roles", "rolebindings"):
            collection(f"{RBAC}/namespaces/team/{plural}")
        for plural in ("configmaps", "pods"):
            collection(f"/api/v1/namespaces/team/{plural}")
        for path in ("/api/v1/namespaces", "/apis/scheduling.k8s.io/v1/priorityclasses"):
            collection(path)
        for version, kinds in KINDS.items():
            resources = [
                {"kind": kind, "name": plural, "namespaced": kind not in ("Namespace", "PriorityClass")}
                for kind, plural in kinds.items()
            ]
            cluster.server.on(version, lambda handler, resources=resources: handler.json({"resources": resources}))
        who = {"status": {"userInfo": {"username": "ann"}}}
        cluster.server.on("/apis/authentication.k8s.io/v1/selfsubjectreviews", lambda handler: handler.json(who, 201))

    cluster.kept, cluster.serve_keeping = kept, serve
    return cluster


@pytest.fixture
def run_path(tmp_path):
    path = tmp_path / "big.yaml"
    path.write_text(RUN)
    return str(path)


def test_what_is_missing_is_shown_made_and_checked_again(windlass, keeping, run_path):
    keeping.objects["service_accounts"] = [named("default")]
    keeping.forbidden = {("create", "secrets"), ("get", "pods/log")}
    keeping.serve_keeping()
    answer = windlass("cluster", "fix", run_path, "--yes")
    assert "kind: ServiceAccount" in answer.out
    (role,) = [value for path, value in keeping.kept.items() if "/roles/" in path]
    assert {path.rpartition("/")[2] for path in keeping.kept} == {"trainer", role["metadata"]["name"]}
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    ]
    assert "3 checks failed before, 2 fail now" in answer.out  # the stand-in has no authorizer that reads roles
    assert "still failing: you may not create secrets" in answer.out
    assert answer.code == 1


@pytest.mark.slow
def test_undo_deletes_what_was_made_and_nothing_else(windlass, keeping, run_path, tmp_path):
    mine = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}}
    path = tmp_path / "more.json"
    path.write_text(json.dumps(mine))
    keeping.objects["service_accounts"] = [named("default")]
    keeping.serve_keeping()
    assert windlass("cluster", "fix", run_path, "--manifest", str(path), "--yes").code == 0
    assert all(value["metadata"]["labels"][FIX_LABEL] == "true" for value in keeping.kept.values())
    theirs = "/api/v1/namespaces/team/configmaps/mine"
    keeping.kept[theirs]["metadata"]["labels"].clear()  # as if somebody had made one of the same name
    answer = windlass("cluster", "fix", run_path, "--manifest", str(path), "--undo", "--yes")
    assert list(keeping.kept) == [theirs]
    assert "not made by windlass, so it stays" in answer.out


def test_nobody_to_confirm_means_nothing_is_made(windlass, keeping, run_path):
    keeping.objects["service_accounts"] = []
    keeping.serve_keeping()
    answer = windlass("cluster", "fix", run_path)
    assert answer.code == 2
    assert "error: without a terminal, windlass cluster fix needs --yes; nothing was done" in answer.err
    assert not keeping.kept


def test_a_sound_cluster_needs_nothing(windlass, keeping, run_path):
    keeping.serve_keeping()
    answer = windlass("cluster", "fix", run_path, "--yes")
    assert "nothing that windlass can make" in answer.out
    assert answer.code == 0


@pytest.mark.parametrize(
    "text", ["[1, 2]", "kind: Pod", "{", "", "{apiVersion: v1, kind: Pod, metadata: null}", "{a: {[]: b}}"]
)
def test_manifests_that_are_none(windlass, keeping, tmp_path, text):
    keeping.serve_keeping()
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    answer = windlass("cluster", "fix", "--manifest", str(path), "--yes")
    assert "Traceback" not in answer.err
    assert not keeping.kept


def test_nothing_to_make_is_json_too(windlass, keeping, run_path):
    keeping.serve_keeping()
    answer = windlass("cluster", "fix", run_path, "--yes", "--json")
    assert json.loads(answer.out)["outcomes"] == []


def test_undo_shows_what_goes_and_asks(windlass, keeping, run_path):
    keeping.objects["service_accounts"] = [named("default")]
    keeping.serve_keeping()
    assert windlass("cluster", "fix", run_path, "--yes").code == 0
    answer = windlass("cluster", "fix", run_path, "--undo")
    assert answer.code == 2
    assert "name: trainer" in answer.out
    assert list(keeping.kept)  # a claim would have taken its checkpoints with it


def test_undo_goes_on_after_what_is_refused(windlass, keeping, tmp_path):
    keeping.serve_keeping()
    maps = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}} for name in ("a", "b")]
    gone = {"apiVersion": "example.com/v1", "kind": "Gone", "metadata": {"name": "g"}}
    path = tmp_path / "maps.yaml"
    path.write_text(yaml.safe_dump_all(maps))
    assert windlass("cluster", "fix", "--manifest", str(path), "--yes").code == 0
    refusing = "/api/v1/namespaces/team/configmaps/b"
    kept = keeping.kept[refusing]
    keeping.server.on(
        refusing,
        lambda handler: (
            handler.json(kept)
            if handler.command == "GET"
            else handler.status(409, "Conflict", "the UID in the precondition does not match")
        ),
    )
    path.write_text(yaml.safe_dump_all([*maps, gone]))
    answer = windlass("cluster", "fix", "--manifest", str(path), "--undo", "--yes")
    assert "precondition does not match" in answer.out
    assert "does not serve Gone" in answer.out
    assert list(keeping.kept) == [refusing]


def test_a_namespace_that_others_use_by_now_stays(windlass, keeping):
    keeping.namespace = None
    keeping.serve_keeping()
    assert windlass("cluster", "fix", "--yes").code == 0
    assert list(keeping.kept) == ["/api/v1/namespaces/team"]
    answer = windlass("cluster", "fix", "--undo", "--yes")  # somebody's claim is there
    assert "others have something in it" in answer.out
    assert list(keeping.kept) == ["/api/v1/namespaces/team"]
    keeping.objects["claims"].clear()
    windlass("cluster", "fix", "--undo", "--yes")
    assert not keeping.kept


def test_kinds_without_a_namespace_are_made_outside_it(windlass, keeping, tmp_path):
    keeping.serve_keeping()
    path = tmp_path / "class.yaml"
    path.write_text("{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: high}, value: 1}")
    windlass("cluster", "fix", "--manifest", str(path), "--yes")
    assert list(keeping.kept) == ["/apis/scheduling.k8s.io/v1/priorityclasses/high"]


def test_somebody_else_gets_every_verb_and_a_role_of_their_own(windlass, keeping, run_path):
    """An administrator lacks nothing, and may fix for several people."""
    keeping.serve_keeping()
    for user in ("bob", "eve"):
        assert windlass("cluster", "fix", run_path, "--for", user, "--yes").code == 0
    roles = [value for path, value in keeping.kept.items() if "/roles/" in path]
    bindings = [value for path, value in keeping.kept.items() if "/rolebindings/" in path]
    assert [binding["subjects"][0]["name"] for binding in bindings] == ["bob", "eve"]
    assert len(roles) == 2
    assert {"create", "watch", "delete"} <= {verb for rule in roles[0]["rules"] for verb in rule["verbs"]}


HELM = """\
#!/bin/sh
echo "$@" >> {log}
[ "$5" = 9.9.9 ] && {{ echo "Error: chart not found" >&2; exit 1; }}
cat <<END
---
# Source: hooks.yaml
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: plugin-settings}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: plugin, namespace: team}}
END
"""


@pytest.fixture
def helm(tmp_path, monkeypatch):
    """A helm that renders one chart."""
    program = tmp_path / "bin" / "helm"
    program.parent.mkdir()
    program.write_text(HELM.format(log=tmp_path / "helm.log"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "helm.log"


def test_a_helm_release_is_shown_made_and_undone(windlass, keeping, helm, monkeypatch):
    monkeypatch.setitem(CHARTS, "nvidia-device-plugin", replace(CHARTS["nvidia-device-plugin"], namespace="team"))
    keeping.serve_keeping()
    release = ("--helm", "nvidia-device-plugin@0.17.4")
    answer = windlass("cluster", "fix", *release, "--yes")
    assert "# helm: nvidia-device-plugin@0.17.4" in answer.out
    assert "kind: ConfigMap" in answer.out
    assert {path.rpartition("/")[2] for path in keeping.kept} >= {"plugin-settings", "plugin"}
    asked = helm.read_text().splitlines()[0]
    assert asked.startswith(
        "template nvidia-device-plugin nvidia-device-plugin --version 0.17.4 --namespace team --repo"
    )
    answer = windlass("cluster", "fix", *release, "--undo", "--yes")
    assert answer.code == 0, answer.err
    assert not any("plugin" in path for path in keeping.kept)


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("nvidia-device-plugin", "is no release that windlass knows"),
        ("other@1.0", "known: nvidia-device-plugin, aws-efa-k8s-device-plugin"),
        ("kueue@9.9.9", "Error: chart not found"),
    ],
)
def test_a_release_that_cannot_be_rendered(windlass, keeping, helm, release, words):
    keeping.serve_keeping()
    answer = windlass("cluster", "fix", "--helm", release, "--yes")
    assert words in answer.err
    assert not keeping.kept


def test_without_helm_its_command_is_said(windlass, keeping, monkeypatch, tmp_path):
    keeping.serve_keeping()
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = windlass("cluster", "fix", "--helm", "cert-manager@1.19.1", "--yes")
    assert "helm is not installed" in answer.err
    assert "helm template cert-manager cert-manager --version 1.19.1" in answer.err
    assert "windlass cluster fix --manifest cert-manager.yaml" in answer.err
