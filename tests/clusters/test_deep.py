"""`windlass cluster check --deep`: the job it makes, what its pods print, and how that is judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.clusters.deep import inside
from windlass.clusters.deep.judging import judge
from windlass.clusters.deep.pods import Told, objects
from windlass.clusters.needs import EFA, Needs

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
    return Told(f"deep-{index}", f"node-{index}", index, full, phase, reason)


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
