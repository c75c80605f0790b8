"""What of the box needs no box: images, versions, the overlay, the stand-in's decisions."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from tests.cluster.box import build, hyperpod, images
from tests.cluster.box.cluster import Cluster
from tests.cluster.box.layout import KUBECONFIG, PAUSE_IMAGE, TRAINER_IMAGE
from tests.cluster.box.overlay import REPOSITORY, box_overlay, mounted_folders


def test_every_program_comes_from_a_pinned_module():
    for program in build.PROGRAMS:
        folder = build.SOURCES / program.module
        assert (folder / "go.mod").exists()
        assert program.module == "pause" or (folder / "go.sum").exists()
    assert build.module_version("kubernetes", "k8s.io/kubernetes").startswith("v1.36.")
    with pytest.raises(LookupError, match="nowhere"):
        build.module_version("kubernetes", "example.org/nowhere")


def test_each_module_has_a_cache_named_by_what_is_compiled_from_it(tmp_path, monkeypatch):
    modules = sorted({program.module for program in build.PROGRAMS})
    before = {module: build.folder(module) for module in modules}
    box = build.version_key()
    monkeypatch.setattr(build, "PROGRAMS", build.PROGRAMS[1:])
    monkeypatch.setattr(build, "SOURCES", shutil.copytree(build.SOURCES, tmp_path / "go"))
    (tmp_path / "go" / "kueue" / "go.sum").write_text("other")
    assert {module for module in modules if build.folder(module) != before[module]} == {"kubernetes", "kueue"}
    assert build.version_key() != box


def test_a_box_starts_without_what_only_some_tests_need(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "cache_root", lambda: tmp_path)
    assert "kueue" not in {part.module for part in build.missing()}
    assert [part.name for part in build.missing("kueue")] == ["kueue", "kueue"]


def test_images_are_complete_and_the_same_every_time(tmp_path, monkeypatch):
    busybox = tmp_path / "busybox"
    busybox.write_text("#!/bin/sh\necho sh; echo ls; echo busybox\n")
    busybox.chmod(0o755)
    monkeypatch.setattr(images, "SEARCH_PATH", str(tmp_path))
    (tmp_path / "pause").write_bytes(b"\x7fELF pause")
    for name in ("a.tar", "b.tar"):
        images.write(tmp_path / name, tmp_path / "pause")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as archive:
        files = {entry.name: archive.extractfile(entry).read() for entry in archive if entry.isfile()}
    index = json.loads(files["index.json"])
    named = {one["annotations"]["io.containerd.image.name"]: one["digest"] for one in index["manifests"]}
    assert {PAUSE_IMAGE, TRAINER_IMAGE} < named.keys()
    for path, content in files.items():
        if path.startswith("blobs/"):
            assert Path(path).name == hashlib.sha256(content).hexdigest()
    manifest = json.loads(files[f"blobs/sha256/{named[TRAINER_IMAGE].removeprefix('sha256:')}"])
    layer = files[f"blobs/sha256/{manifest['layers'][0]['digest'].removeprefix('sha256:')}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        links = {entry.name: entry.linkname for entry in archive if entry.issym()}
        everybody = archive.getmember("tmp").mode
    assert links["lib64"] == "usr/lib64"
    assert links["usr/bin/ls"] == "busybox"
    assert everybody == 0o1777


def test_a_busybox_with_shared_libraries_will_not_do(tmp_path, monkeypatch):
    (tmp_path / "busybox").symlink_to(sys.executable)
    monkeypatch.setattr(images, "SEARCH_PATH", str(tmp_path))
    assert images.busybox() is None


def test_the_overlay_mounts_everything_once_and_read_only():
    spec = box_overlay("node", claim=None)
    mounts = spec["containers"][0]["volumeMounts"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in spec["volumes"]}
    assert all(mount["readOnly"] for mount in mounts)
    folders = mounted_folders()
    assert any(folder in (REPOSITORY, *REPOSITORY.parents) for folder in folders)
    assert not [(a, b) for a in folders for b in folders if a in b.parents]


def test_a_cluster_of_ones_own_needs_an_image_and_a_claim(monkeypatch):
    other = Cluster(KUBECONFIG, box=False)
    monkeypatch.delenv("WINDLASS_TEST_IMAGE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="WINDLASS_TEST_IMAGE"):
        other.overlay()
    monkeypatch.setenv("WINDLASS_TEST_IMAGE", "somewhere/trainer:1")
    monkeypatch.setenv("WINDLASS_TEST_CLAIM", "fsx")
    spec = other.overlay("node")
    assert spec["containers"][0]["image"] == "somewhere/trainer:1"
    assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "fsx"}
    with pytest.raises(pytest.skip.Exception, match="kills a kubelet"):
        other.kill_kubelet("node1")


class Recorded:
    """An API server that knows some pods and remembers what it is asked."""

    def __init__(self, phases):
        self.pods = [
            {"metadata": {"name": name, "namespace": "n"}, "status": {"phase": phase}} for name, phase in phases.items()
        ]
        self.created, self.deleted, self.status = [], [], {}

    def get(self, path):
        return {"items": self.pods}

    def exists(self, path):
        return True

    def post(self, path, body):
        self.created.append(body)

    def delete(self, path, grace_seconds=None):
        self.deleted.append(path.rsplit("/", 1)[1])

    def merge(self, path, body):
        self.status |= body["status"]


def job(*conditions, restarts=0, retries=0):
    group = {"name": "pods", "replicas": 2, "template": {"spec": {"containers": [{"name": "main"}]}}}
    status = {"restartCount": restarts, "conditions": [{"type": one, "status": "True"} for one in conditions]}
    return {
        "metadata": {"name": "j", "namespace": "n", "uid": "1"},
        "spec": {"replicaSpecs": [group], "runPolicy": {"jobMaxRetryCount": retries}},
        "status": status,
    }


def test_the_hyperpod_stand_in_creates_what_is_missing():
    api = Recorded({"j-pods-0": "Pending"})
    hyperpod.reconcile(api, job("Created"))
    assert [pod["metadata"]["name"] for pod in api.created] == ["j-pods-1"]
    environment = {one["name"]: one["value"] for one in api.created[0]["spec"]["containers"][0]["env"]}
    assert environment["PET_NODE_RANK"] == "1"
    assert environment["PET_MASTER_ADDR"] == "j-pods-0.j.n.svc"


@pytest.mark.parametrize(
    ("phases", "conditions", "expected"),
    [
        ({"j-pods-0": "Running", "j-pods-1": "Running"}, ("Created",), "Running"),
        ({"j-pods-0": "Succeeded", "j-pods-1": "Succeeded"}, ("Created", "Running"), "Completed"),
        ({"j-pods-0": "Running", "j-pods-1": "Failed"}, ("Created", "Running"), "Failed"),
    ],
)
def test_the_hyperpod_stand_in_reports(phases, conditions, expected):
    api = Recorded(phases)
    hyperpod.reconcile(api, job(*conditions))
    assert api.status["conditions"][-1]["type"] == expected


def test_the_hyperpod_stand_in_restarts_a_job_under_new_names():
    api = Recorded({"j-pods-0": "Running", "j-pods-1": "Failed"})
    hyperpod.reconcile(api, job("Created", "Running", retries=1))
    assert sorted(api.deleted) == ["j-pods-0", "j-pods-1"]
    assert api.status == {"restartCount": 1, "conditions": []}
    api = Recorded({"j-pods-1": "Failed"})  # still ending
    hyperpod.reconcile(api, job("Created", restarts=1, retries=1))
    assert [pod["metadata"]["name"] for pod in api.created] == ["j-pods-0-1", "j-pods-1-1"]


def test_the_hyperpod_stand_in_lets_finished_and_suspended_jobs_alone():
    api = Recorded({})
    hyperpod.reconcile(api, job("Completed"))
    suspended = job()
    suspended["spec"]["runPolicy"]["suspend"] = True
    hyperpod.reconcile(api, suspended)
    assert (api.created, api.deleted, api.status) == ([], [], {})
