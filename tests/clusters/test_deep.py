"""`windlass cluster check --deep`: the job it makes, what its pods print, and how that is judged."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.clusters.conftest import named
from windlass.clusters.deep import inside, pods
from windlass.clusters.deep.judging import judge
from windlass.clusters.deep.pods import PodReport, objects
from windlass.clusters.needs import EFA, Needs
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access

END = {"check": "end"}


def needs(num_pods=2, **requests):
    mounts = [{"name": "windlass-runs", "mountPath": "/windlass/runs"}, {"name": "run", "mountPath": "/x"}]
    container = {
        "name": "trainer",
        "image": "train:1",
        "command": ["python3.12", "-m", "windlass.targets.kubernetes.entry"],
        "env": [
            {"name": "HF_HOME", "value": "/cache"},
            {"name": "WINDLASS_NODES", "value": "2"},
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "big-secret", "key": "HF_TOKEN"}}},
        ],
        "resources": {"requests": requests},
        "volumeMounts": mounts,
    }
    volumes = [
        {"name": "windlass-runs", "persistentVolumeClaim": {"claimName": "work"}},
        {"name": "run", "configMap": {"name": "big-run"}},
    ]
    spec = {"containers": [container], "volumes": volumes, "nodeSelector": {"a": "b"}, "restartPolicy": "OnFailure"}
    return Needs(pod={"spec": spec}, num_pods=num_pods, claim="work")


def told(index, *lines, phase="Succeeded", reason=""):
    full = [{"pod": index, "host": f"node-{index}", **line} for line in lines]
    return PodReport(f"deep-{index}", f"node-{index}", index, full, phase, reason)


def test_the_job_has_the_pods_of_the_run_and_nothing_of_its_submission():
    service, job = objects(needs(), "team", "windlass-deep-1")
    spec = job["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert job["spec"]["completions"] == 2
    assert (spec["nodeSelector"], spec["restartPolicy"], spec["subdomain"]) == ({"a": "b"}, "Never", "windlass-deep-1")
    assert [volume["name"] for volume in spec["volumes"]] == ["windlass-runs"]  # the run's config map is not there
    assert [mount["name"] for mount in container["volumeMounts"]] == ["windlass-runs"]
    names = {entry["name"] for entry in container["env"]}
    assert "HF_HOME" in names
    assert not {"WINDLASS_NODES", "HF_TOKEN"} & names
    assert container["command"][0] == "python3.12"
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]


def link(origin, speed):
    return {"check": "link", "origin": origin, "gbit_s": speed}


def collective(wrong=0, size=1 << 26):
    return {"check": "collective", "backend": "gloo", "world": 2, "bytes": size, "wrong": wrong, "gbit_s": 3.0}


SOUND = {"check": "dns", "name": "x", "address": "10.0.0.1", "seconds": 0.2, "tries": 1}


@pytest.mark.parametrize(
    ("lines", "check", "status", "evidence"),
    [
        ([SOUND, link(1, 8.0), collective(), END], "links", "pass", ""),
        ([{**SOUND, "error": "Name or service not known"}, END], "dns", "fail", "Name or service not known"),
        ([SOUND, {"check": "port", "to": 1, "port": 29650, "error": "timed out"}, END], "links", "fail", "timed out"),
        ([SOUND, {"check": "link", "origin": 1, "error": "nothing came"}, END], "links", "fail", "nothing came"),
        ([SOUND, link(1, 0.4), END], "links", "warn", "pods 1 and 0"),
        ([SOUND, collective(wrong=3), END], "all-reduce", "fail", "67108864 bytes"),
        ([SOUND, {"check": "collective", "error": "no torch"}, END], "all-reduce", "fail", "no torch"),
        ([SOUND, {"check": "network", "networks": ["Socket"]}, END], "network", "fail", "NCCL's log: Socket"),
        ([SOUND, {"check": "network", "networks": ["AWS Libfabric", "OFI"]}, END], "network", "pass", ""),
        ([SOUND, {"check": "disk", "folder": "/r", "write_mib_s": 9, "read_mib_s": 9}, END], "disk", "warn", "256 MiB"),
        ([SOUND, {"check": "disk", "folder": "/r", "error": "Read-only"}, END], "disk", "fail", "Read-only"),
        ([SOUND], "deep-pods", "fail", "its log ends early"),
    ],
)
def test_what_pods_print_is_judged(lines, check, status, evidence):
    other = told(1, SOUND, link(0, 8.0), END)
    results = judge([told(0, *lines), other], needs(**{EFA: "1"}), None)
    found = [result for result in results if result.check == check]
    assert [result.status for result in found] == [status]
    assert evidence in (found[0].evidence or "")


def test_a_pod_that_waits_is_named_with_its_reason():
    waiting = told(1, phase="Pending", reason="0/2 nodes are available: 2 Insufficient nvidia.com/gpu")
    results = judge([told(0, SOUND, END), waiting], needs(), None)
    assert any("Insufficient nvidia.com/gpu" in (result.evidence or "") for result in results)


@pytest.mark.train
def test_one_pod_tries_its_disk_and_its_collective(tmp_path):
    source = Path(inside.__file__).read_text(encoding="utf-8")
    environment = {
        "JOB_COMPLETION_INDEX": "0",
        "WINDLASS_DEEP_PODS": "1",
        "WINDLASS_DEEP_HOSTS": "localhost",
        "WINDLASS_DEEP_SOURCE": source,
        "WINDLASS_DEEP_FOLDER": str(tmp_path),
    }
    command = "import os; exec(compile(os.environ['WINDLASS_DEEP_SOURCE'], 'deep', 'exec'))"
    done = subprocess.run(
        [sys.executable, "-c", command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    lines = [json.loads(line.removeprefix(inside.MARK)) for line in done.stdout.splitlines() if inside.MARK in line]
    checks = [line["check"] for line in lines]
    assert checks == ["dns", "disk", "collective", "collective", "collective", "end"], done.stderr
    assert all(line["wrong"] == 0 for line in lines if line["check"] == "collective")
    assert not list(tmp_path.iterdir())


FAKE_TORCH = """
import os, sys, time
class cuda:
    device_count = staticmethod(lambda: int(os.environ["FAKE_GPUS"]))
    set_device = staticmethod(lambda device: None)
device = str
"""
FALLBACK = """\
ip-10:7:9 [0] nccl_net_ofi_create_plugin:259 NCCL WARN NET/OFI aws-ofi-nccl initialization failed
ip-10:7:9 [0] NCCL INFO NET/IB : No device found.
ip-10:7:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.227.37<0>
ip-10:7:9 [0] NCCL INFO Using network Socket
"""
CARRIED = """\
ip-10:7:9 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
ip-10:7:9 [0] NCCL INFO Using network Libfabric
"""
OVER_TCP = CARRIED.replace("efa", "tcp;ofi_rxm")


def run_inside(tmp_path, distributed, *, gpus):
    """What a pod of one prints whose torch is a stand-in: the lines of its log."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(FAKE_TORCH)
    (tmp_path / "torch" / "distributed.py").write_text(distributed)
    source = Path(inside.__file__).read_text(encoding="utf-8").replace("PATIENCE = 120.0", "PATIENCE = 2.0")
    environment = {
        "JOB_COMPLETION_INDEX": "0",
        "WINDLASS_DEEP_PODS": "1",
        "WINDLASS_DEEP_HOSTS": "localhost",
        "WINDLASS_DEEP_SOURCE": source,
        "PYTHONPATH": str(tmp_path),
        "FAKE_GPUS": str(gpus),
    }
    command = [sys.executable, "-c", "import os; exec(compile(os.environ['WINDLASS_DEEP_SOURCE'], 'deep', 'exec'))"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    return [json.loads(line.removeprefix(inside.MARK)) for line in done.stdout.splitlines() if inside.MARK in line]


def test_a_collective_that_hangs_is_a_failure(tmp_path):
    hanging = "import time\ndef init_process_group(backend): time.sleep(600)\n"
    lines = run_inside(tmp_path, hanging, gpus=0)
    results = judge([told(0, *lines)], needs(1), None)
    assert [(result.check, result.status) for result in results if result.check == "all-reduce"] == [
        ("all-reduce", "fail")
    ]


@pytest.mark.parametrize(("log", "status"), [(FALLBACK, "fail"), (CARRIED, "pass"), (OVER_TCP, "fail"), ("", "fail")])
def test_only_nccl_saying_that_it_uses_efa_is_proof(tmp_path, log, status):
    writing = f"""
import os, sys
def init_process_group(backend):
    with open(os.environ["NCCL_DEBUG_FILE"], "w") as file: file.write({log!r})
    sys.exit(0)
"""
    lines = run_inside(tmp_path, writing, gpus=1)
    results = judge([told(0, *lines)], needs(1, **{EFA: "1"}), None)
    assert [result.status for result in results if result.check == "network"] == [status]


def test_pods_that_say_nothing_of_collectives_have_not_passed():
    results = judge([told(0, SOUND, link(1, 8.0), END), told(1, SOUND, link(0, 8.0), END)], needs(), None)
    assert [result.status for result in results if result.check == "all-reduce"] == ["fail"]


@pytest.fixture
def ring(monkeypatch):
    """This process as pod 0 of two, with a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(inside, "PORT", server.getsockname()[1])
        monkeypatch.setattr(inside, "SECONDS", 0.1)
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
        monkeypatch.setenv("WINDLASS_DEEP_PODS", "2")
        yield server


@pytest.mark.slow
def test_a_link_that_swallows_what_is_sent_is_reported(ring, capsys, monkeypatch):
    monkeypatch.setattr(inside, "SECONDS", 0.5)  # nobody reads: as where large packets are dropped on the way
    inside.send("127.0.0.1")
    assert json.loads(capsys.readouterr().out.removeprefix(inside.MARK))["error"]


def test_a_pod_that_asks_whether_another_is_there_is_not_measured(ring, capsys):
    ring.close()
    receiver = inside.Receiver()
    receiver.start()
    inside.connect("127.0.0.1").close()
    inside.send("127.0.0.1")
    receiver.join(timeout=30)
    receiver.server.close()
    links = [json.loads(line.removeprefix(inside.MARK)) for line in capsys.readouterr().out.splitlines()]
    assert [(link["check"], link["origin"], link["gbit_s"] > 0) for link in links] == [("link", 1, True)]


@pytest.mark.slow
def test_a_pod_that_pulls_its_image_is_waited_for_and_a_silent_network_is_not(ring, monkeypatch):
    ring.close()  # refused: the pod's address is there, its container is not
    monkeypatch.setattr(inside, "PATIENCE", 0.5)
    late = []
    timer = threading.Timer(2.5, lambda: late.append(socket.create_server(("127.0.0.1", inside.PORT))))
    timer.start()
    inside.connect("127.0.0.1").close()
    late[0].close()
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: (_ for _ in ()).throw(TimeoutError("timed out")))
    monkeypatch.setattr(inside, "SILENT_TRIES", 1)
    with pytest.raises(TimeoutError):
        inside.connect("127.0.0.1")


def test_a_name_that_is_unknown_for_long_is_said_and_corrected(ring, monkeypatch, capsys):
    monkeypatch.setattr(inside, "PATIENCE", 0.5)
    answers = iter([socket.gaierror(socket.EAI_NONAME, "Name or service not known")] * 2)

    def look_up(*_, **__):
        for error in answers:
            raise error
        return [(None, None, None, None, ("10.0.0.9", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert inside.resolve("deep-1.deep") == "10.0.0.9"
    lines = [json.loads(line.removeprefix(inside.MARK)) for line in capsys.readouterr().out.splitlines()]
    assert ["error" in line for line in lines] == [True, False]
    results = judge([told(0, *lines, END), told(1, SOUND, END)], needs(), None)
    assert [result.status for result in results if result.check == "dns"] == ["pass"]


def test_the_wait_ends_when_nothing_moves_and_not_while_an_image_is_pulled(cluster, monkeypatch):
    reasons = ["ContainerCreating"] * 30 + ["ImagePullBackOff"]
    pod = named("p", "team", spec={"nodeName": "a"})

    def listed(handler):
        reason = reasons.pop(0) if len(reasons) > 1 else reasons[0]
        state = {"waiting": {"reason": reason, "message": "no such image"}}
        pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": state}]}
        handler.json({"items": [pod]})

    for path in ("/api/v1/namespaces/team/services", "/apis/batch/v1/namespaces/team/jobs"):
        cluster.server.on(path, lambda handler: handler.json({}))
    cluster.server.on("/api/v1/namespaces/team/pods", listed)
    monkeypatch.setattr(pods, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(pods, "DEADLINE_SECONDS", 0.5)
    answers = pods.run(Api(access()), needs(1), "team")
    assert reasons == ["ImagePullBackOff"]  # 30 answers took longer than the deadline
    assert "no such image" in answers[0].reason


def test_a_node_without_ipv6_is_tried_over_ipv4(ring, monkeypatch):
    ring.close()
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    receiver = inside.Receiver()
    receiver.server.close()
    assert receiver.server.family == socket.AF_INET


def test_pods_with_a_sidecar_end_and_are_read(cluster, monkeypatch):
    """An injected sidecar runs on after the trainer: the pod never ends, and its log needs a container's name."""
    made, end = {}, (inside.MARK + json.dumps({"check": "end", "pod": 0}) + "\n").encode()

    def create(handler):
        made.update(json.loads(handler.body) if handler.command == "POST" else {})
        handler.json({})

    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 128, "reason": "StartError", "message": "no sh"}}}
    states = [{"name": "istio-proxy", "state": {"running": {}}}, ended]
    pod = named("p", "team", spec={"nodeName": "a"}, status={"phase": "Running", "containerStatuses": states})
    cluster.server.on("/api/v1/namespaces/team/services", create)
    cluster.server.on("/apis/batch/v1/namespaces/team/jobs", create)
    cluster.server.on("/api/v1/namespaces/team/pods", lambda handler: handler.json({"items": [pod]}))
    cluster.server.on(
        "/api/v1/namespaces/team/pods/p/log",
        lambda handler: (
            handler.stream(end)
            if handler.params.get("container") == "trainer"
            else handler.status(400, "BadRequest", "a container name must be specified")
        ),
    )
    monkeypatch.setattr(pods, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(pods, "DEADLINE_SECONDS", 20)
    begin = time.monotonic()
    answers = pods.run(Api(access()), dataclasses.replace(needs(1), queue="main"), "team")
    assert time.monotonic() - begin < 15
    assert [line["check"] for line in answers[0].lines] == ["end"]
    assert "no sh" in answers[0].reason
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "main"  # or Kueue may keep it suspended for ever
