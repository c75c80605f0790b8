"""Metrics in other places: one run is killed, goes on, and is the same run in TensorBoard, MLflow, W&B and a sink."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import resume, train
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec import parse_run

SINK = """
import json

class Sink:
    def __init__(self, run, folder, step):
        self.file = (folder.path / "sink.jsonl").open("a")
        self.file.write(json.dumps({"goes_on": step}) + "\\n")

    def write(self, record):
        if record["step"] == 2:
            raise RuntimeError("not this one")
        self.file.write(json.dumps(record) + "\\n")
        self.file.flush()

    def close(self, *, finished):
        self.file.write(json.dumps({"finished": finished}) + "\\n")
        self.file.close()
"""


def killed_and_resumed(
    corpus: Path, root: Path, loggers: list[str], variables: dict[str, str], **settings: Any
) -> tuple[RunFolder, str]:
    run = tiny_run(corpus, train__steps=6, train__loggers=loggers, checkpoint__every=2, **settings)
    killed = train(root, run, faults="kill:rank=0,step=5", variables=variables)
    assert killed.codes == [-9], killed.output
    return resume(root, run, variables=variables).folder, killed.output


@pytest.mark.train
def test_sinks_and_traces_of_a_run_that_is_killed(corpus: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("wandb", reason="pip install 'windlass[wandb]'")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sinks.py").write_text(SINK)
    folder, said = killed_and_resumed(
        corpus,
        tmp_path,
        ["tensorboard", "wandb", "sinks:Sink"],
        {"WANDB_MODE": "offline"},
        code=str(tmp_path / "code"),
        train__profile={"first": 3, "steps": 2},
    )
    assert "Sink did not take a record: RuntimeError: not this one" in said
    records = [json.loads(line) for line in (folder.path / "sink.jsonl").read_text().splitlines()]
    begins = [record["goes_on"] for record in records if "goes_on" in record]
    assert begins[0] == 0
    assert begins[1] in (2, 4)  # whether the save of step 4 was over when it was killed
    steps = [record["step"] for record in records if "step" in record]
    assert steps == [1, 3, 4, *range(begins[1] + 1, 7)]
    assert records[-1] == {"finished": True}
    board = events.EventAccumulator(str(folder.path / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    identity = json.loads((folder.path / "loggers.json").read_text())["wandb"]
    offline = sorted((folder.path / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in offline] == [identity, identity]
    assert logged_steps(next(offline[1].glob("*.wandb"))) == [1, 2, 3, 4, 5, 6]
    (trace,) = (folder.path / "profile").glob("*.trace.json.gz")
    assert trace.name.startswith("steps-3-4-rank-0000")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names
    assert "aten::mm" in next((folder.path / "profile").glob("*.txt")).read_text()


def logged_steps(path: Path) -> list[int]:
    """The steps of a W&B file: records of protobuf in the form of LevelDB's log, here all within one block."""
    from wandb.proto import wandb_internal_pb2

    content, place, steps = path.read_bytes(), 7, []
    while place + 7 <= len(content):
        length = int.from_bytes(content[place + 4 : place + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[place + 7 : place + 7 + length])
        place += 7 + length
        items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        if "step" in items:
            steps.append(json.loads(items["step"]))
    return steps


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[str]:
    """A real server, of whichever mlflow there is: WINDLASS_MLFLOW names its program."""
    program = os.environ.get("WINDLASS_MLFLOW") or shutil.which("mlflow")
    if program is None:
        pytest.skip("no mlflow here: pip install mlflow, or WINDLASS_MLFLOW=/path/to/mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        program,
        "server",
        "--port",
        str(port),
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--workers",
        "1",
    ]
    variables = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # three more processes
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables)
    try:
        for _ in range(600):
            try:
                ask(address, "experiments/search", max_results=1)  # the first request makes the database
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


def ask(address: str, what: str, **values: Any) -> Any:
    if what.startswith("GET "):
        with urllib.request.urlopen(f"{address}/api/2.0/mlflow/{what.removeprefix('GET ')}", timeout=30) as answer:
            return json.load(answer)
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/{what}", data=json.dumps(values).encode(), method="POST"
    )
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.campaign
@pytest.mark.campaign_only
@pytest.mark.train
def test_mlflow_knows_one_run(corpus: Path, tmp_path: Path, mlflow: str) -> None:
    folder, _ = killed_and_resumed(corpus, tmp_path, ["mlflow"], {"MLFLOW_TRACKING_URI": mlflow}, data__holdout=0.1)
    identity = json.loads((folder.path / "loggers.json").read_text())["mlflow"]
    experiments = ask(mlflow, "experiments/search", max_results=10, filter="name = 'windlass'")["experiments"]
    (run,) = ask(mlflow, "runs/search", experiment_ids=[experiments[0]["experiment_id"]])["runs"]
    assert (run["info"]["run_id"], run["info"]["status"]) == (identity, "FINISHED")
    points = ask(mlflow, f"GET metrics/get-history?run_id={identity}&metric_key=train/loss")["metrics"]
    assert {int(point["step"]) for point in points} == {1, 2, 3, 4, 5, 6}
    assert {"train/loss", "validation/loss"} <= {metric["key"] for metric in run["data"]["metrics"]}
    assert {"train.steps": "6"}.items() <= {param["key"]: param["value"] for param in run["data"]["params"]}.items()


class Refusing(BaseHTTPRequestHandler):
    """A server that answers nothing but errors."""

    def do_POST(self) -> None:
        self.send_response(503)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Taking(BaseHTTPRequestHandler):
    """A server that takes every request, and keeps it."""

    taken: list[tuple[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.taken.append((self.path.rpartition("/mlflow/")[2], body))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


def test_what_a_kill_took_along_is_sent_to_mlflow_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.common.files import append_json_line
    from windlass.trainer.callbacks.loggers import open_sinks, remember_id

    run = parse_run({"name": "r", "model": {"preset": "llama-tiny"}, "data": {}, "train": {"loggers": ["mlflow"]}})
    folder = RunFolder(tmp_path)
    for step in range(1, 6):  # 5 was after the checkpoint: it comes again by itself
        append_json_line(folder.metrics, {"kind": "step", "step": step, "loss": 1.0 / step, "time": float(step)})
    remember_id(folder, "mlflow", "known")
    handler = type("Handler", (Taking,), {"taken": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
    (sink,) = open_sinks(run, folder, 4)
    sink.write({"kind": "step", "step": 5, "loss": 0.2, "time": 9.0})
    sink.close(finished=True)
    server.shutdown()
    batches = [body for path, body in handler.taken if path == "runs/log-batch"]
    points = [(metric["step"], metric["timestamp"]) for body in batches for metric in body["metrics"]]
    assert points == [(1, 1000), (2, 2000), (3, 3000), (4, 4000), (5, 9000)]
    assert {body["run_id"] for body in batches} == {"known"}
    assert handler.taken[-1][1]["status"] == "FINISHED"


def test_what_a_service_refuses_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.trainer.callbacks.loggers import MLflow, known_id, numbers_of, open_sinks, remember_id

    run = parse_run({"name": "r", "model": {"preset": "llama-tiny"}, "data": {}, "train": {"loggers": ["mlflow"]}})
    folder = RunFolder(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI"):
        open_sinks(run, folder, 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
    with pytest.raises(UserError, match="does not take the run"):
        open_sinks(run, folder, 0)
    remember_id(folder, "mlflow", "known")
    monkeypatch.setattr(MLflow, "PATIENCE_S", 0.2)
    (sink,) = open_sinks(run, folder, 3)  # a run that goes on is not held up by a server that is away
    sink.write({"kind": "step", "step": 4, "loss": 1.0, "time": 0.0})
    sink.close(finished=True)
    monkeypatch.setattr(MLflow, "LARGEST_QUEUE", 1)
    (sink,) = open_sinks(run, folder, 3)
    for step in range(4, 10):  # more than there is room for, while nothing can be sent
        sink.write({"kind": "step", "step": step, "loss": 1.0, "time": 0.0})
    closing = Thread(target=sink.close, kwargs={"finished": True}, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    server.shutdown()
    assert known_id(folder, "mlflow") == "known"
    record = {"kind": "validation", "step": 4, "loss": 1.5, "accuracy": 1, "time": 0.0, "attempt": 1}
    assert numbers_of(record) == {"validation/loss": 1.5, "validation/accuracy": 1.0}
