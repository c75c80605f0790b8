"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, and sinks of the user's own.

Rank 0 has them. The ids under which services know a run are kept in its folder, so that an attempt after a kill goes on
under the same one. What a sink does wrong is logged and never ends a run.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import queue
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, Protocol

from windlass.common import own_code
from windlass.common.files import write_atomically
from windlass.errors import UserError
from windlass.runfolder import RunFolder, steps_of
from windlass.spec import Run
from windlass.spec.compatibility import leaves

log = logging.getLogger(__name__)
IDS = "loggers.json"
SENT_AGAIN = 1000  # steps
LEFT_OUT = frozenset(("kind", "step", "steps", "time", "attempt"))  # of a record: they are no metrics


class MetricSink(Protocol):
    """What a sink of one's own offers; its class is called with the run, its folder and the step it goes on from."""

    def write(self, record: dict[str, Any]) -> None:
        """One record of metrics.jsonl: of a step, or of a validation."""

    def close(self, *, finished: bool) -> None:
        """The attempt has ended; `finished`: and the run with it."""


def open_sinks(run: Run, folder: RunFolder, step: int) -> list[MetricSink]:
    """UserError for one that cannot be had, before anything is trained."""
    names = dict.fromkeys([*(["tensorboard"] if run.train.tensorboard else []), *run.train.loggers])
    return [(KINDS.get(name) or own_code.load(name, "train.loggers"))(run, folder, step) for name in names]


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """The metrics of a record by the names that services group them under: train/loss, validation/accuracy."""
    group = "train" if record["kind"] == "step" else record["kind"]
    values = {key: value for key, value in record.items() if key not in LEFT_OUT}
    return {f"{group}/{key}": float(value) for key, value in values.items() if isinstance(value, int | float)}


def known_id(folder: RunFolder, service: str) -> str | None:
    try:
        value = json.loads((folder.path / IDS).read_text()).get(service)
    except (OSError, ValueError):
        return None
    return str(value) if value else None


def remember_id(folder: RunFolder, service: str, value: str) -> None:
    ids: dict[str, str] = {}
    if (folder.path / IDS).is_file():
        ids = json.loads((folder.path / IDS).read_text())
    write_atomically(folder.path / IDS, json.dumps({**ids, service: value}) + "\n")


def recent_steps(folder: RunFolder, step: int) -> list[dict[str, Any]]:
    """The newest steps before a run goes on: a kill takes along what a sink had not sent yet."""
    return [record for number, record in sorted(steps_of(folder).items()) if number <= step][-SENT_AGAIN:]


class TensorBoard:
    """Event files in the run folder. Steps that an attempt repeats replace those of the one before."""

    def __init__(self, run: Run, folder: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.board: Any = SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in numbers_of(record).items():
            self.board.add_scalar(name, value, record["step"])

    def close(self, *, finished: bool) -> None:
        self.board.close()


class WeightsAndBiases:
    """A run of Weights & Biases; WANDB_MODE=offline writes it below the run folder, for `wandb sync`."""

    def __init__(self, run: Run, folder: RunFolder, step: int) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise UserError(
                "train.loggers names wandb, which is not installed here", fix="pip install 'windlass[wandb]'"
            ) from None
        identity = known_id(folder, "wandb") or secrets.token_hex(4)
        remember_id(folder, "wandb", identity)
        try:
            self.run: Any = wandb.init(
                id=identity,
                resume="allow",
                name=run.name,
                project=os.environ.get("WANDB_PROJECT", "windlass"),
                dir=str(folder.path),
                config=dict(leaves(run.model_dump(mode="json"))),
            )
        except wandb.errors.Error as error:
            raise UserError(
                "Weights & Biases does not take the run",
                evidence=str(error),
                fix="wandb login    or WANDB_MODE=offline",
            ) from None
        # The step is a metric of its own: wandb's may not go back, and an attempt repeats steps.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        # W&B's own process holds records back for a while, and a kill takes it along: the newest are sent again.
        for record in recent_steps(folder, step):
            self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        self.run.log({"step": record["step"], **numbers_of(record)})

    def close(self, *, finished: bool) -> None:
        self.run.finish(exit_code=0)


class MLflow:
    """A run on an MLflow server, by its REST interface: nothing need be installed.

    A thread sends, so that a server which is slow or away holds nothing up; what it could not send before the end is
    counted in the log.
    """

    MOST_METRICS = 1000  # of one request
    LARGEST_QUEUE = 100_000
    PATIENCE_S = 20.0  # at the end

    def __init__(self, run: Run, folder: RunFolder, step: int) -> None:
        self.address = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
        if not self.address.startswith(("http://", "https://")):
            raise UserError(
                "train.loggers names mlflow, and MLFLOW_TRACKING_URI is no address of a server",
                evidence=f"it is {self.address!r}" if self.address else "it is not set",
                fix="export MLFLOW_TRACKING_URI=http://HOST:5000    (on Kubernetes: target.kubernetes.secrets)",
            )
        known = known_id(folder, "mlflow")
        self.identity = known or self._create(run)
        remember_id(folder, "mlflow", self.identity)
        self.records: queue.Queue[dict[str, Any] | None] = queue.Queue(self.LARGEST_QUEUE)
        self.unsent = 0
        if known:  # MLflow keeps a point that it has already, with the same time and value, once
            for record in recent_steps(folder, step):
                self.write(record)
        self.sender = threading.Thread(target=self._send_all, args=(known is not None,), name="mlflow", daemon=True)
        self.sender.start()

    def _create(self, run: Run) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "windlass")
        try:
            experiment = self._experiment(name)
            created = self._call("runs/create", experiment_id=experiment, run_name=run.name, start_time=_now())
            identity = str(created["run"]["info"]["run_id"])
            settings = [{"key": key, "value": str(value)[:500]} for key, value in leaves(run.model_dump(mode="json"))]
            for begin in range(0, len(settings), 100):
                self._call("runs/log-batch", run_id=identity, params=settings[begin : begin + 100])
        except (OSError, KeyError, ValueError) as error:
            raise UserError(
                f"MLflow at {self.address} does not take the run",
                evidence=_message(error),
                fix="train.loggers without mlflow",
            ) from None
        return identity

    def _experiment(self, name: str) -> str:
        try:
            return str(self._call("experiments/create", name=name)["experiment_id"])
        except urllib.error.HTTPError as error:
            if error.code != 400:  # it exists
                raise
        answer = self._call("experiments/search", max_results=1, filter=f"name = '{name}'")
        return str(answer["experiments"][0]["experiment_id"])

    def write(self, record: dict[str, Any]) -> None:
        try:
            self.records.put_nowait(record)
        except queue.Full:
            self.unsent += 1

    def close(self, *, finished: bool) -> None:
        with contextlib.suppress(queue.Full):  # of a server that has been away for long
            self.records.put(None, timeout=self.PATIENCE_S)
        self.sender.join(self.PATIENCE_S)
        left = self.unsent + self.records.qsize()
        if self.sender.is_alive() or left:
            log.warning("MLflow did not get %d records of this attempt; metrics.jsonl has them", left)
            return
        try:
            self._call(
                "runs/update", run_id=self.identity, status="FINISHED" if finished else "KILLED", end_time=_now()
            )
        except OSError as error:
            log.warning("MLflow was not told how the run ended: %s", _message(error))

    def _send_all(self, goes_on: bool) -> None:
        if goes_on:
            self._until_sent("runs/update", status="RUNNING")
        for records in self._gathered():
            metrics = [
                {"key": key, "value": value, "timestamp": int(1000 * record["time"]), "step": record["step"]}
                for record in records
                for key, value in numbers_of(record).items()
            ]
            for begin in range(0, len(metrics), self.MOST_METRICS):
                self._until_sent("runs/log-batch", metrics=metrics[begin : begin + self.MOST_METRICS])

    def _gathered(self) -> Iterator[list[dict[str, Any]]]:
        """What is there by now, at least one record; ends with the attempt."""
        while True:
            records = [self.records.get()]
            while not self.records.empty() and records[-1] is not None:
                records.append(self.records.get())
            whole = [record for record in records if record is not None]
            if whole:
                yield whole
            if records[-1] is None:
                return

    def _until_sent(self, what: str, **values: Any) -> None:
        wait_s = 1.0
        while True:
            try:
                self._call(what, run_id=self.identity, **values)
                return
            except urllib.error.HTTPError as error:
                if error.code < 500:  # it would be refused again
                    self.unsent += 1
                    log.warning("MLflow refused %s: %s", what, _message(error))
                    return
            except OSError as error:
                log.warning("MLflow does not answer, trying again in %.0f s: %s", wait_s, _message(error))
            time.sleep(wait_s)
            wait_s = min(60.0, 2 * wait_s)

    def _call(self, what: str, **values: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        user, token = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_TOKEN")
        if token:
            headers["Authorization"] = f"Bearer {token}"
        elif user:
            pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        request = urllib.request.Request(
            f"{self.address}/api/2.0/mlflow/{what}", data=json.dumps(values).encode(), headers=headers
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def _now() -> int:
    return int(1000 * time.time())


def _message(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code}: {error.read().decode(errors='replace')[:300]}"
    return f"{type(error).__name__}: {error}"
