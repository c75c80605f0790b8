"""Bundles, run folders, the command, and that no secret leaves."""

# ruff: noqa: E501 (messages as they are found in the field)

from __future__ import annotations

import json
import os
import tarfile
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.diagnose.test_verdict import CASES, PROGRESS, pod, traceback
from windlass.cli.main import run_command
from windlass.common.files import append_json_line
from windlass.diagnose import Facts, diagnose
from windlass.diagnose.bundle import facts_of_run, read_bundle, save_bundle
from windlass.diagnose.classes import CLASSES
from windlass.diagnose.facts import schema
from windlass.diagnose.secrets import clean_text, without_secrets
from windlass.runfolder import RunFolder

# Made up, in the shapes of the real ones; put together here so that no scanner takes them for real.
HUB = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz012345"
AWS_ID, AWS_KEY = "AKIA" + "IOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY"
JWT = "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
SECRET = "correct-horse-battery-9"
SHAPES = [
    f"HF_TOKEN={HUB}", f"export HF_TOKEN='{HUB}'", f"token {HUB} in the middle", f"AWS_SECRET_ACCESS_KEY={AWS_KEY}", f"aws_access_key_id = {AWS_ID}",
    f"Authorization: Bearer {JWT}", f"'Authorization': 'Bearer {SECRET}xx'", f"curl -H 'authorization: Basic {SECRET}=='", f"https://user:{SECRET}@registry.example.com/v2",
    f"postgres://trainer:{SECRET}@db:5432/x", f"password={SECRET}", f"password: {SECRET}", f'{{"password": "{SECRET}"}}', f"--password {SECRET}", f"--hf-token={SECRET}", f"--api-key {SECRET}",
    f"WANDB_API_KEY={SECRET}", f"MY_SERVICE_TOKEN={SECRET}", f"my.service.secret={SECRET}", f"{{'HF_TOKEN': '{SECRET}', 'RANK': '0'}}", f"machine api.wandb.ai login user password {SECRET}",
    f"s3://b/k?X-Amz-Signature={SECRET}&X-Amz-Date=1", f"https://x.blob.core.windows.net/c?sig={SECRET}&se=1", f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\nabc\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}", "ghp_" + SECRET.replace("-", "") + "abcdef0123", f"SLACK_WEBHOOK_URL=https://hooks.slack.com/services/T0/B0/{SECRET}", f"docker login -u me --password-stdin <<< {SECRET} # password={SECRET}",
    f"NGC_API_KEY={SECRET}", f'os.environ["OPENAI_API_KEY"] = "{SECRET}"', f"PGPASSWORD={SECRET} psql", f"client_secret: '{SECRET}'", f"db_passwd={SECRET}", f"private_key={SECRET}", f"AZURE_STORAGE_ACCOUNT_KEY={SECRET}",
]  # fmt: skip
SECRETS = (HUB, AWS_ID, AWS_KEY, JWT, SECRET, SECRET.replace("-", ""))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_secret_survives_in_a_text(shape):
    for text in (shape, f"2026-11-15 10:00:00 INFO {shape}", f"a b\n{shape}\nc d"):
        cleaned = clean_text(text)
        assert not any(secret in cleaned for secret in SECRETS), cleaned


def test_ordinary_lines_stay_as_they_are():
    for text in (
        "step=10 tokens=4096 tok/s=900",
        "max_tokens: 4096",
        "bos_token: <s>",
        "tokenizer: gpt2",
        "KeyError: 'text'",
        "Insufficient nvidia.com/gpu",
        "author: jane",
    ):
        assert clean_text(text) == text


@pytest.mark.parametrize("shape", SHAPES)
def test_no_secret_survives_in_a_bundle(shape, tmp_path):
    container = {
        "name": "pytorch",
        "env": [
            {"name": "HF_TOKEN", "value": HUB},
            {"name": "ODD_NAME", "value": SECRET},
            {"name": "DB_PASSWORD", "value": SECRET},
            {"name": "NCCL_DEBUG", "value": "INFO"},
        ],
        "args": ["train.py", "--hub-token", SECRET, f"--key={AWS_ID}", shape],
    }
    job = {
        "kind": "PyTorchJob",
        "metadata": {
            "name": "x",
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(container)},
        },
        "spec": {"containers": [container], "command": shape},
    }
    facts = {
        "job": job,
        "pods": [{"metadata": {"name": "x-0"}, "spec": {"containers": [container]}}],
        "logs": {"rank0": f"{shape}\nthe password is {SECRET}\nbye"},
    }
    save_bundle(facts, tmp_path / "b.tar")
    content = (tmp_path / "b.tar").read_bytes().decode("utf-8", "replace")
    assert not any(secret in content for secret in SECRETS)
    assert "NCCL_DEBUG" in content
    assert "INFO" in content
    assert "OPENSSH" in shape or read_bundle(tmp_path / "b.tar")["logs"]["rank0"].endswith(
        "bye"
    )  # a key without an end takes all


def test_the_data_of_a_secret_object_is_removed_everywhere():
    cleaned = without_secrets(
        {"job": [{"kind": "Secret", "data": {"a": SECRET}}], "logs": {"rank0": f"it said {SECRET}"}}
    )
    assert SECRET not in json.dumps(cleaned)


@pytest.mark.parametrize("name", CASES)
def test_a_saved_bundle_is_diagnosed_as_its_facts(name, tmp_path):
    expected, facts = CASES[name]
    if not facts:
        return
    save_bundle(facts, tmp_path / "b.tar.gz")
    assert diagnose(Facts.read(read_bundle(tmp_path / "b.tar.gz"))).name == expected


def test_facts_come_through_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    facts = {"logs": {"rank0": traceback("ModuleNotFoundError: No module named 'x'")}}
    writer = threading.Thread(target=lambda: pipe.write_text(json.dumps(facts)))
    writer.start()
    assert diagnose(Facts.read(read_bundle(pipe))).name == "user_import"
    writer.join()


def test_a_folder_of_parts(tmp_path):
    (tmp_path / "pods.json").write_text(
        json.dumps({"items": [pod(phase="Failed", state={"terminated": {"exitCode": 1}})]})
    )
    (tmp_path / "sacct.txt").write_text("JobID|State|ExitCode\n1|FAILED|1:0\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text(traceback("ModuleNotFoundError: No module named 'x'"))
    assert diagnose(Facts.read(read_bundle(tmp_path))).name == "user_import"


@pytest.fixture
def why(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)

    def ask(*arguments):
        capfd.readouterr()
        code = run_command(["why", *map(str, arguments)])
        return int(code), *capfd.readouterr()

    return ask


def run_folder(path, history, logs, error=None):
    (path / "logs").mkdir(parents=True)
    (path / "run.yaml").write_text("model: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\n")
    (path / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history))
    for name, text in logs.items():
        (path / "logs" / name).write_text(text)
    if error:
        (path / "logs" / f"rank-{error['rank']:04d}.error.json").write_text(json.dumps(error))


LAUNCHED = {"time": 1763200000.0, "event": "launched", "attempt": 1}


def test_a_run_of_this_machine(why, tmp_path):
    error = {
        "rank": 1,
        "host": "here",
        "attempt": 1,
        "time": 1763200090.0,
        "error": "x",
        "traceback": traceback("ZeroDivisionError: division by zero"),
        "retry": False,
    }
    run_folder(
        tmp_path / "runs" / "mine",
        [LAUNCHED, {"time": 1763200100.0, "event": "exit", "state": "failed", "code": 1, "reason": "rank 1"}],
        {"rank-0000.log": PROGRESS, "rank-0001.log": PROGRESS},
        error,
    )
    code, out, err = why("mine")
    assert code == 0, err
    assert out.startswith("user_code: ")
    assert "ZeroDivisionError: division by zero" in out
    assert "rank 1" in out
    assert "fix " in out
    answer = json.loads(why("mine", "--json")[1])
    assert answer["class"] == "user_code"
    assert answer["retry"] == "no"


@pytest.mark.parametrize(
    ("state", "expected"), [("finished", "succeeded"), ("stopped", "cancelled"), ("preempted", "preempted")]
)
def test_how_a_run_ended(why, tmp_path, state, expected):
    run_folder(
        tmp_path / "runs" / "mine",
        [LAUNCHED, {"time": 1763200100.0, "event": "exit", "state": state, "code": 0}],
        {"rank-0000.log": PROGRESS},
    )
    assert json.loads(why("mine", "--json")[1])["class"] == expected


def test_a_slow_rank_is_named_while_the_run_trains(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.record("launched", attempt=1)
    rows = [
        {"rank": rank, "host": f"n{rank}", "step_s": 2.0, "behind_s": behind} for rank, behind in ((0, 0), (1, 0.9))
    ]
    append_json_line(folder.metrics, {"kind": "ranks", "step": 9, "slow": [1], "ranks": rows, "time": 1e9})
    assert facts_of_run(folder)["logs"]["ranks"].endswith("slow rank 1 on n1: 0.9 s behind the others in steps of 2 s")
    assert diagnose(Facts.read(facts_of_run(folder))).name == "straggler"
    folder.record("exit", state="failed", code=1)
    assert "ranks" not in facts_of_run(folder)["logs"], "that it was slow is not why it ended"


def test_only_the_last_attempt_of_a_run_counts(why, tmp_path):
    log = f"2025-11-15T09:46:40Z INFO begin\n{traceback('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')}\n2025-11-15T09:48:21Z INFO begin\n{traceback('KeyError: 5')}"
    run_folder(
        tmp_path / "runs" / "mine",
        [
            LAUNCHED,
            {"time": 1763200100.0, "event": "launched", "attempt": 2},
            {"time": 1763200200.0, "event": "exit", "state": "failed"},
        ],
        {"rank-0000.log": log},
    )
    assert json.loads(why("mine", "--json")[1])["class"] == "user_code"


def test_the_command_on_bundles(why, tmp_path):
    _, facts = CASES["the trainer out of memory"]
    (tmp_path / "facts.json").write_text(json.dumps({**facts, "logs": {"rank0": f"HF_TOKEN={HUB}\n{PROGRESS}"}}))
    code, out, _ = why("--facts", "facts.json", "--save", "b.tar")
    assert code == 0
    assert out.startswith("host_oom: ")
    assert "OOMKilled" in out
    assert tarfile.is_tarfile(tmp_path / "b.tar")
    assert HUB.encode() not in (tmp_path / "b.tar").read_bytes()
    assert why("b.tar")[1].startswith("host_oom: ")
    for wrong in ([], ["nope"], ["--facts", "nope.json"], ["b.tar", "--facts", "facts.json"]):
        code, out, err = why(*wrong)
        assert code == 2
        assert err.startswith("error: ")
    (tmp_path / "nothing.json").write_text("{}")
    assert "lines are above" not in why("nothing.json")[1]
    stopped = {"job": {"status": {"conditions": [{"type": "Stopped", "status": "True", "reason": "Stopped"}]}}}
    (tmp_path / "stopped.json").write_text(json.dumps(stopped))
    assert why("stopped.json")[1].startswith("cancelled: ")
    assert "fail again" not in why("stopped.json")[1]  # it goes on
    (tmp_path / "torn.json").write_text('{"pods": [')
    assert "holds no facts" in why("--facts", "torn.json")[2]


def test_the_schema_allows_every_case():
    properties = schema()["properties"]
    for _, facts in CASES.values():
        assert set(facts) <= set(properties)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=40)
    | st.sampled_from(
        ["\ud800", "OOMKilled", "2026-11-15T10:00:00Z", "Traceback (most recent call last):\n", "RuntimeError: x"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "metadata",
                    "status",
                    "spec",
                    "items",
                    "conditions",
                    "containerStatuses",
                    "state",
                    "lastState",
                    "terminated",
                    "waiting",
                    "reason",
                    "message",
                    "name",
                    "jobs",
                    "exitCode",
                    "steps",
                    "type",
                ]
            )
            | st.text(max_size=5),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)
BUNDLES = (
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("target", "job", "pods", "events", "nodes", "workload", "slurm", "logs"), ANYTHING),
    )
    | ANYTHING
)
PIECES = st.sampled_from(["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    raise ValueError", "ValueError: x", "[rank1]: ", "RuntimeError: CUDA out of memory. Tried to allocate 9.9.9 GiB", "step 10 loss 1", "The above exception was the direct cause of the following exception:", "During handling of the above exception, another exception occurred:", "what():  x", "Root Cause (first observed failure):", "  time      : x", "  rank      : 1 (local_rank: 1)", "restarting: attempt 2", "E1115 10:00:00.1 x.cpp:1] y", "\x1b[31m", "0: ", "NCCL WARN x", "slurmstepd: error: *** "])  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(BUNDLES)
def test_any_facts_are_answered(bundle):
    verdict = diagnose(Facts.read(bundle))
    assert verdict.name in CLASSES
    json.dumps(verdict.as_dict()).encode()
    json.dumps(without_secrets(bundle), default=str)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        st.sampled_from(["rank0", "rank1", "submit", "kernel", "launcher"]),
        st.lists(PIECES | st.text(max_size=30), max_size=25).map("\n".join),
        max_size=4,
    )
)
def test_any_logs_are_answered(logs):
    verdict = diagnose(Facts.read({"logs": logs}))
    assert verdict.name in CLASSES
    assert 0 <= verdict.confidence <= 1


@pytest.mark.slow
def test_huge_and_hostile_logs_take_seconds():
    import time

    begin = time.process_time()  # of this process: the machine may be busy
    logs = {
        "rank0": "a=" * 100_000,
        "rank1": ("x" * 5000 + "\n") * 60,
        "rank2": "step 1 loss 2\n" * 30_000,
        "rank3": "Traceback (most recent call last):\n" * 3_000,
        "rank4": "[" * 100_000,
        "rank5": ("token " * 700 + "\n") * 50,
    }
    diagnose(Facts.read({"logs": logs}))
    without_secrets({"logs": logs})
    assert time.process_time() - begin < 15


def test_what_kubectl_prints_and_a_single_log_are_bundles(tmp_path):
    """`kubectl get pods -o json > pods.json`, one pod, one job; a log that somebody sent."""
    killed = pod(phase="Failed", state={"terminated": {"reason": "OOMKilled", "exitCode": 137}})
    labelled = {**killed, "kind": "Pod"}
    for name, content in {"list.json": {"kind": "List", "items": [labelled]}, "pod.json": labelled}.items():
        (tmp_path / name).write_text(json.dumps(content))
        assert diagnose(Facts.read(read_bundle(tmp_path / name))).name == "host_oom", name
    (tmp_path / "train.log").write_text(traceback("ModuleNotFoundError: No module named 'x'"))
    assert diagnose(Facts.read(read_bundle(tmp_path / "train.log"))).name == "user_import"
