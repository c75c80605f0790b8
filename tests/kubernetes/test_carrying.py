"""Code and secrets that go with a job, and what a pod makes of them."""

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import tracemalloc
from importlib import resources

import pytest

from tests.kubernetes.golden import cluster_of, run_of
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.runfolder import RunFolder
from windlass.targets.kubernetes.manifests import code
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind
from windlass.targets.kubernetes.manifests.code import Carried, config_maps, gather, pack_code
from windlass.targets.kubernetes.manifests.render import render, settle
from windlass.targets.kubernetes.pod.log_forwarder import LogForwarder, PodOutput, Records, errors_of
from windlass.targets.kubernetes.pod.place import (
    NotArrivedError,
    code_digest,
    interface_of,
    launcher_environment,
    node_index,
    unpack_code,
)


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "module.py").write_text("answer = 42\n")
    (folder / "start.sh").write_text("#!/bin/sh\n")
    (folder / "start.sh").chmod(0o755)
    for ignored in (".git/config", "package/__pycache__/module.pyc", "runs/old/metrics.jsonl", ".env"):
        (folder / ignored).parent.mkdir(parents=True, exist_ok=True)
        (folder / ignored).write_text("secret")
    return folder


def mount(folder, maps):
    """What a projected volume makes of ConfigMaps."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for config_map in maps:
        for name, data in config_map.get("binaryData", {}).items():
            (folder / name).write_bytes(base64.b64decode(data))
        for name, text in config_map.get("data", {}).items():
            (folder / name).write_text(text)


def test_code_arrives_as_it_left(project, tmp_path, monkeypatch):
    monkeypatch.setattr(code, "PART_BYTES", 50)
    archive = pack_code(project)
    maps = config_maps("run", Carried({"code": archive}))
    assert len(maps) > 2
    mount(tmp_path / "carried", maps)
    wanted = code_digest(tmp_path / "carried")
    assert wanted == hashlib.sha256(archive).hexdigest()
    there = unpack_code(tmp_path / "carried", tmp_path / "scratch", wanted)
    assert sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()) == [
        "package/module.py",
        "start.sh",
    ]
    assert (there / "start.sh").stat().st_mode & 0o100
    assert (there / "package/module.py").read_text() == "answer = 42\n"


def test_the_same_files_are_the_same_bytes(project):
    before = pack_code(project)
    (project / "package" / "module.py").touch()
    assert pack_code(project) == before
    (project / "package" / "module.py").write_text("answer = 43\n")
    assert pack_code(project) != before


def test_a_pod_waits_for_the_code_that_the_others_run(project, tmp_path):
    mount(tmp_path / "carried", config_maps("run", Carried({"code": pack_code(project)})))
    old = code_digest(tmp_path / "carried")
    (project / "package" / "module.py").write_text("answer = 43\n")
    new = pack_code(project)
    with pytest.raises(NotArrivedError):
        unpack_code(tmp_path / "carried", tmp_path / "scratch", hashlib.sha256(new).hexdigest(), patience=0)
    mount(tmp_path / "carried", config_maps("run", Carried({"code": new})))
    there = unpack_code(tmp_path / "carried", tmp_path / "scratch", hashlib.sha256(new).hexdigest(), patience=0)
    assert "43" in (there / "package/module.py").read_text()
    assert old not in str(there)
    assert unpack_code(tmp_path / "carried", tmp_path / "scratch", None) is None


def test_code_that_is_too_large_is_refused_with_its_largest_files(project, monkeypatch):
    (project / "weights.bin").write_bytes(bytes(range(256)) * 4096)
    monkeypatch.setattr(code, "PART_BYTES", 100)
    with pytest.raises(UserError) as error:
        pack_code(project)
    assert "largest: weights.bin (1.0 MiB)" in error.value.evidence
    assert "image" in error.value.fix
    with pytest.raises(UserError, match="no folder"):
        pack_code(project / "nothing")


@pytest.mark.parametrize("linked", ["file", "folder", "nothing"])
def test_a_link_out_of_the_folder_is_refused_by_name(project, tmp_path, linked):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "passwd").write_text("root:x:0:0")
    target = {"file": outside / "passwd", "folder": outside, "nothing": tmp_path / "gone"}[linked]
    (project / "package" / "link").symlink_to(target)
    with pytest.raises(UserError, match="leads out of the folder") as error:
        pack_code(project)
    assert f"package/link -> {target}" in error.value.evidence
    (project / "package" / "link").unlink()
    (project / "package" / ".link").symlink_to(target)  # hidden: it stays here
    assert pack_code(project)


def test_links_inside_the_folder_arrive(project, tmp_path):
    (project / "same.py").symlink_to("package/module.py")
    (project / "alias").symlink_to("package")
    (project / "package" / "absolute").symlink_to(project / "package")
    (project / "package" / "loop").symlink_to("..")
    mount(tmp_path / "carried", config_maps("run", Carried({"code": pack_code(project)})))
    there = unpack_code(tmp_path / "carried", tmp_path / "scratch", code_digest(tmp_path / "carried"))
    assert (there / "same.py").read_text() == "answer = 42\n"
    assert (there / "alias" / "module.py").read_text() == "answer = 42\n"
    assert (there / "package" / "absolute" / "module.py").resolve() == (there / "package" / "module.py").resolve()
    assert (there / "package" / "loop").resolve() == there.resolve()


def test_libraries_and_packages_with_odd_names_arrive(project):
    (project / "fast.so").write_bytes(b"\x7fELF")
    (project / "package" / "runs").mkdir()
    (project / "package" / "runs" / "__init__.py").write_text("")
    assert names_in(pack_code(project)) == ["fast.so", "package/module.py", "package/runs/__init__.py", "start.sh"]


def names_in(archive):
    return tarfile.open(fileobj=io.BytesIO(archive)).getnames()


def test_a_large_file_is_not_read_to_learn_its_size(project):
    with (project / "weights.bin").open("wb") as file:
        file.truncate(3 << 30)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="too large") as error:
            pack_code(project)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert "largest: weights.bin (3072.0 MiB)" in error.value.evidence


def test_what_is_no_file_is_refused(project):
    os.mkfifo(project / "pipe")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        pack_code(project)


@pytest.mark.parametrize("folder", [".aws", ".ssh", ".kube", ".config/gcloud", "."])
def test_a_folder_of_credentials_is_no_code(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "config").write_text("k")
    for path in (tmp_path / folder, tmp_path / "innocent"):
        if path.name == "innocent":
            path.symlink_to(tmp_path / folder)
        with pytest.raises(UserError, match=r"credentials|home folder") as error:
            pack_code(path)
        assert "target.kubernetes.secrets" in error.value.fix


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ\n"
HOLDING_SECRETS = [
    ("deploy.pem", KEY),
    ("notes.txt", "aws_secret_access_key = wJalrXUtnFEMIxK7MDENGxbPxRfiCYEXAMPLEKEYx\n"),
    ("train.sh", "export HF_TOKEN=hf_" + "aB3" * 11 + "x\n"),
    ("sa.json", '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG9w0B"}'),
    ("cluster.yaml", "users:\n- name: a\n  user:\n    client-key-data: LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0t\n"),
    ("id_ed25519", "anything"),
    ("credentials", "anything"),
]


@pytest.mark.parametrize(("name", "text"), HOLDING_SECRETS)
def test_a_file_that_holds_a_secret_is_refused_by_name(project, name, text):
    (project / "package" / name).write_text(text)
    with pytest.raises(UserError, match="secret") as error:
        pack_code(project)
    assert f"package/{name}" in error.value.evidence
    assert "b3Blbn" not in str(error.value)
    assert "hf_aB3" not in str(error.value)


def test_code_that_only_speaks_of_secrets_is_no_secret(project):
    (project / "package" / "keys.py").write_text(
        'BEGIN = "-----BEGIN PRIVATE KEY-----"\ntoken = os.environ["HF_TOKEN"]\naws_secret_access_key = None\n'
    )
    (project / "authority.pem").write_text("-----BEGIN CERTIFICATE-----\nMIIBszCCAVmgAwIBAgIUZ\n")
    assert "package/keys.py" in names_in(pack_code(project))


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"HF_TOKEN": "hf_abc"}, ["HF_TOKEN"]),
        ({"WANDB_API_KEY": "0123456789", "DB_PASSWORD": "hunter2"}, ["DB_PASSWORD", "WANDB_API_KEY"]),
        ({"ANY": "hf_" + "aB3" * 11 + "x"}, ["ANY"]),
        ({"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "7", "GOOGLE_APPLICATION_CREDENTIALS": "/secrets/key"}, []),
        ({"HF_TOKEN_PATH": "/run/token", "SSH_KEY": "/keys/one", "HF_TOKEN": ""}, []),
    ],
)
def test_a_secret_in_plain_sight_is_warned_of(variables, named):
    run = run_of("llama-tiny", JobKind.INDEXED, environment=variables)
    cluster = cluster_of("llama-tiny")
    warnings = render(resolve(settle(run, cluster)), cluster, Carried(), submission="a").warnings
    assert [name for name in variables if any(name in warning for warning in warnings)] == sorted(
        named, key=list(variables).index
    )
    for warning in warnings:
        assert "target.kubernetes.secrets" in warning
        assert not any(value and value in warning for value in variables.values())


def test_a_secret_in_the_overlay_is_warned_of():
    overlay = {"containers": [{"name": "trainer", "env": [{"name": "HF_TOKEN", "value": "hf_abc"}]}]}
    run = run_of("llama-tiny", JobKind.INDEXED, pod=overlay)
    cluster = cluster_of("llama-tiny")
    (warning,) = render(resolve(settle(run, cluster)), cluster, Carried(), submission="a").warnings
    assert "HF_TOKEN" in warning


def test_windlass_itself_can_go_along_and_starts(tmp_path):
    run = run_of("llama-tiny", JobKind.INDEXED, carry_windlass=True)
    cluster = cluster_of("llama-tiny")
    carried = gather(run, {})
    request = render(resolve(settle(run, cluster)), cluster, carried, submission="a")
    maps = [manifest for manifest in request.objects if manifest["kind"] == "ConfigMap"]
    assert all(len(json.dumps(config_map.get("binaryData", {}))) < 1_300_000 for config_map in maps)
    mount(tmp_path / "carried", [config_map for config_map in maps if "-windlass-" in config_map["metadata"]["name"]])
    pod = request.job["spec"]["template"]["spec"]["containers"][0]
    assert pod["command"] == ["python3", "/windlass/carried/bootstrap.py"]
    script = resources.files("windlass.targets.kubernetes.pod").joinpath("bootstrap.py").read_text()
    for name in ("carried", "scratch"):
        script = script.replace(f'"/windlass/{name}"', f'"{tmp_path / name}"')
    script = script.replace("windlass.targets.kubernetes.entry", "windlass.errors")
    done = subprocess.run(
        [sys.executable, "-c", script + "\n"], env={"PYTHONSAFEPATH": "1"}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "scratch").glob("windlass-*/windlass/targets/kubernetes/manifests/schemas/shared.json"))


def test_secrets_are_read_from_the_environment_and_from_files(tmp_path):
    (tmp_path / "token").write_text("from-file\n")
    secrets = ["A", f"B=file:{tmp_path / 'token'}", "C=secret:theirs/key"]
    run = run_of("llama-tiny", JobKind.INDEXED, secrets=secrets)
    carried = gather(run, {"A": "from-env"})
    assert carried.secret_values == {"A": "from-env", "B": "from-file"}
    assert "from-env" not in repr(carried)
    cluster = cluster_of("llama-tiny")
    request = render(resolve(settle(run, cluster)), cluster, carried, submission="a")
    pod = request.job["spec"]["template"]["spec"]["containers"][0]
    references = {variable["name"]: variable["valueFrom"] for variable in pod["env"] if variable["name"] in "ABC"}
    assert references["A"] == {"secretKeyRef": {"name": "llama-tiny-secrets", "key": "A"}}
    assert references["C"] == {"secretKeyRef": {"name": "theirs", "key": "key"}}


@pytest.mark.parametrize("secret", ["A", "A=file:/does/not/exist"])
def test_a_secret_without_a_value_is_refused(secret):
    with pytest.raises(UserError, match="secret A"):
        gather(run_of("llama-tiny", JobKind.INDEXED, secrets=[secret]), {})


def test_an_existing_secret_is_not_copied():
    run = run_of("llama-tiny", JobKind.INDEXED, secrets=["A=secret:theirs/key"])
    cluster = cluster_of("llama-tiny")
    request = render(resolve(settle(run, cluster)), cluster, Carried(token="t"), submission="a")
    assert request.secret_values == {"WINDLASS_TOKEN": "t"}
    hyperpod = run_of("llama-tiny", JobKind.HYPERPOD, secrets=["A=secret:theirs/key"])
    request = render(resolve(settle(hyperpod, cluster)), cluster, Carried(token="t"), submission="a")
    assert not [manifest for manifest in request.objects if manifest["kind"] == "Secret"]


def test_every_submission_has_a_secret_of_its_own_that_changes_no_digest():
    run = run_of("llama-tiny", JobKind.INDEXED)
    cluster = cluster_of("llama-tiny")
    carried = [gather(run, {}) for _ in range(2)]
    assert len(carried[0].token) == 64
    assert carried[0].token != carried[1].token
    assert carried[0].token not in repr(carried[0])
    requests = [render(resolve(settle(run, cluster)), cluster, record, submission="a") for record in carried]
    assert requests[0].digest == requests[1].digest
    (secret,) = [manifest for manifest in requests[0].objects if manifest["kind"] == "Secret"]
    assert requests[0].with_secret_values(secret)["stringData"] == {"WINDLASS_TOKEN": carried[0].token}
    pod = requests[0].job["spec"]["template"]["spec"]["containers"][0]
    reference = {"secretKeyRef": {"name": "llama-tiny-secrets", "key": "WINDLASS_TOKEN"}}
    assert {"name": "WINDLASS_TOKEN", "valueFrom": reference} in pod["env"]


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        ({"WINDLASS_NODE_INDEX": "2"}, 2),
        ({"JOB_COMPLETION_INDEX": "1"}, 1),
        ({"WINDLASS_NODE_INDEX": "0", "WINDLASS_NODE_ROLE": "master", "MASTER_ADDR": "x"}, 0),
        ({"WINDLASS_NODE_INDEX": "0", "WINDLASS_NODE_ROLE": "worker", "MASTER_ADDR": "x"}, 1),
        ({"WINDLASS_NODE_INDEX": "3", "WINDLASS_NODE_ROLE": "worker"}, 3),  # elastic: no master
    ],
)
def test_a_pod_knows_its_number(environment, node):
    assert node_index(environment) == node


def test_a_pod_without_a_number_says_so():
    with pytest.raises(UserError, match="does not know its number"):
        node_index({})


def test_what_operators_tell_torchrun_is_not_passed_on():
    class Here:
        nodes, address = 3, "127.0.0.1"

    told = {
        "PET_NNODES": "3",
        "MASTER_ADDR": "x",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "PATH": "/bin",
        "WINDLASS_TOKEN": "t",
    }
    kept = launcher_environment(told, Here())
    assert kept == {"PATH": "/bin", "WINDLASS_RUNS": "/windlass/runs", "GLOO_SOCKET_IFNAME": "lo"}
    assert launcher_environment({"GLOO_SOCKET_IFNAME": "eth1"}, Here())["GLOO_SOCKET_IFNAME"] == "eth1"
    assert interface_of("203.0.113.7") is None


def printed(capsys):
    return capsys.readouterr().out.splitlines()


def test_records_are_said_once_with_their_place_and_go_on_in_another_pod(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    first = LogForwarder(PodOutput(), Records(folder))
    folder.record("launched", attempt=1)
    folder.record("started", step=0)
    first.close()
    lines = printed(capsys)
    assert len(lines) == 2
    identity, _, offset = lines[1].split()[2].partition("@")
    assert folder.history.read_bytes()[int(offset) :].decode().strip() == lines[1].split(maxsplit=3)[3]
    with folder.history.open("a") as file:
        file.write('{"event":"torn')  # by a kill
    folder.record("resumed", step=4)
    second = LogForwarder(PodOutput(), Records(folder))
    second.close()
    (line,) = printed(capsys)
    assert line.split()[2].startswith(f"{identity}@")
    assert json.loads(line.split(maxsplit=3)[3])["event"] == "resumed"


def test_a_file_that_cannot_be_read_for_a_while_silences_nobody(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.metrics.mkdir()  # as with a file system that is gone for a moment: every reading fails
    forwarder = LogForwarder(PodOutput(), Records(folder))
    logs = tmp_path / "logs"
    logs.mkdir()
    forwarder.follow(logs, logs / "launcher.log", first_rank=0)
    (logs / "launcher.log").write_text("first\n")
    lines, deadline = [], time.monotonic() + 20
    while len(lines) < 2 and time.monotonic() < deadline:
        lines += printed(capsys)
        time.sleep(0.05)
    folder.metrics.rmdir()
    folder.metrics.write_text('{"kind":"step"}\n')
    while not any(line.startswith("windlass-record metrics") for line in lines) and time.monotonic() < deadline:
        lines += printed(capsys)
        time.sleep(0.05)
    forwarder.close()
    assert "first" in lines
    assert sum("cannot be read" in line or "Is a directory" in line for line in lines) == 1
    assert lines[-1].startswith("windlass-record metrics ")


@pytest.mark.parametrize("note", ["[]", "{}", '{"id": 7, "metrics": "x"}', "torn", '{"id": "a", "metrics": null}'])
def test_a_note_that_is_none_begins_anew(tmp_path, note):
    folder = RunFolder(tmp_path)
    (tmp_path / "emitted.json").write_text(note)
    assert [file.offset for file in Records(folder).files] == [0, 0]


@pytest.mark.parametrize("rank", [None, "x", [], 1e999])
def test_an_error_file_without_a_rank_is_nobodys(tmp_path, rank):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for number, value in enumerate((rank, 1)):
        folder.rank_error(number).write_text(json.dumps({"attempt": 1, "rank": value, "error": "boom"}))
    assert [error["rank"] for error in errors_of(folder, 1, range(2))] == [1]


def test_ranks_speak_with_their_rank_in_whole_lines(tmp_path, capsys):
    logs, launcher = tmp_path / "logs", tmp_path / "logs" / "launcher.log"
    streams = {rank: logs / "none_x" / "attempt_0" / str(rank) for rank in range(2)}
    for folder in streams.values():
        folder.mkdir(parents=True)
    launcher.write_text("torchrun says\nwindlass-record metrics x@0 {}\n")
    forwarder = LogForwarder(PodOutput(), None)
    forwarder.follow(logs, launcher, first_rank=4)
    (streams[1] / "stdout.log").write_text("half a")
    forwarder.flush(rest=False)
    assert printed(capsys) == ["torchrun says", " windlass-record metrics x@0 {}"]
    (streams[1] / "stdout.log").write_text("half a line\nwindlass-record history - {}\nlast")
    (streams[0] / "stderr.log").write_text("warning\n")
    forwarder.close()
    assert sorted(printed(capsys)) == [
        "[rank 4] warning",
        "[rank 5] half a line",
        "[rank 5] last",
        "[rank 5] windlass-record history - {}",
    ]
