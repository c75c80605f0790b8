"""All runs, by the ids that the page uses: rows of the list, and the views of those that somebody looks at."""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.catalog.instances import instances
from windlass.common.files import finite, parse_record, real, words
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.spec.compatibility import leaves
from windlass.targets.launch.ending import unrecorded_end
from windlass.targets.launch.tail import newest_steps
from windlass.targets.protocol import ENDED, JobStatus
from windlass.ui.growing import open_plain
from windlass.ui.runs import RunView

ROW_SECONDS = 0.8  # for which the row of a run on this machine holds
CLUSTER_SECONDS = 15.0  # and of one that a cluster or a scheduler is asked about
MOST_VIEWS = 24  # in memory; the one that nobody looked at for longest goes
MOST_ROWS_IN_VIEWS = 1_500_000
MOST_SWEEPS = 100
SLICE_SECONDS = 0.05  # of a long file that is read in the background
MOST_APPRAISED = 20  # runs whose goodput is counted in one go
MOST_APPRAISED_BYTES = 128 * 1024 * 1024
APPRAISAL_SECONDS = 20.0
QUIET_SECONDS = 3.0  # after the start, which belong to the first page
UNREADABLE = "–"
READ_FILES = ("run.yaml", "history.jsonl", "metrics.jsonl", "supervisor.json", "events.jsonl")
NOT_PLAIN = (-1, -1)  # a link, which could lead out of the folder, or a pipe, on which a reader would wait
LOCAL = ("local", UNREADABLE)  # asking costs nothing

Row = dict[str, Any]


@dataclass(frozen=True)
class Sources:
    """What commands know about runs; the command that starts the page passes it in."""

    row: Callable[[RunFolder], Row]  # as `windlass ls --json` prints it
    clusters: Mapping[str, Callable[[], Iterable[Row]]]  # by name: the runs that a cluster knows
    describe: Callable[[Mapping[str, Any]], str | None]  # a record of the history in a sentence
    verdict: Callable[[RunFolder, Row | None], dict[str, Any]]  # as `windlass why --json` prints it; with end_of_row
    summary: Callable[[RunFolder], dict[str, Any]]  # as `windlass show --json` prints it
    goodput: Callable[[RunFolder], float | None]  # time training over time paid
    evaluations: Callable[[RunFolder], list[dict[str, Any]]]  # as `windlass show --json` prints them


class UnknownRunError(KeyError):
    """There is no run with this id, or no longer."""


@dataclass
class Known:
    """A run of the list: its row, and what that was made of."""

    folder: RunFolder | None  # None: only its cluster has one
    row: Row = field(default_factory=dict)
    signature: tuple[Any, ...] = ()
    kind: str = "local"  # of its target
    asked: tuple[Any, ...] = ()  # the signature with which its cluster was last asked
    cost_per_hour: float | None = None
    goodput: float | None = None
    appraised: tuple[Any, ...] = ()  # the signature that goodput is of
    appraised_at: float = -math.inf


class Library:
    """Ids are names of folders below the runs folder, found by listing it: no path is ever made from an id."""

    def __init__(self, root: Path, sources: Sources) -> None:
        self.root, self.sources = root, sources
        self.problem: str | None = None  # why the runs of clusters are not listed
        self._known: dict[str, Known] = {}
        self._views: dict[str, RunView] = {}
        self._lock = threading.RLock()
        self._listed = 0.0
        self._began = time.monotonic()
        self._asked_at = -math.inf
        self._asking = False
        self._readers: set[str] = set()  # views that a thread reads to their end
        self._appraising = False

    def rows(self) -> dict[str, Row]:
        """The rows of all runs, by id; each is read again only when it may have changed."""
        with self._lock:
            now = time.monotonic()
            if now - self._listed > ROW_SECONDS:
                self._list_folders()
                self._ask_clusters(now)
                self._appraise(now)
                self._listed = now
            return {run_id: known.row for run_id, known in self._known.items() if known.row}

    def _list_folders(self) -> None:
        here = {_printable(path.parent.name): path.parent for path in self.root.glob("*/run.yaml")}
        for gone in [run_id for run_id, known in self._known.items() if known.folder and run_id not in here]:
            del self._known[gone]
            self._views.pop(gone, None)
        for name, path in here.items():
            known = self._known.get(name)
            if known is None or known.folder is None:
                known = self._known[name] = Known(RunFolder(path))
            self._refresh_row(name, known)

    def _refresh_row(self, name: str, known: Known) -> None:
        """Of a run on this machine now; of one on a cluster, which may not answer, soon and in a thread."""
        assert known.folder is not None
        signature = _signature(known.folder)
        if unreadable := [name for name, stamp in zip(READ_FILES, signature, strict=True) if stamp == NOT_PLAIN]:
            known.signature, known.kind, reason = signature, UNREADABLE, f"{unreadable[0]} is a link or no file"
            known.row = {"name": name, "target": UNREADABLE, "state": "unknown", "reason": reason, "id": name}
            return
        if signature[0] != (known.signature or (None,))[0]:
            known.kind = _kind(known.folder)
        is_settled = known.row.get("state") in ENDED and signature == known.signature
        known.signature = signature
        if is_settled:
            return
        if known.kind in LOCAL:
            known.row = self._row(name, known)
        elif not known.row:
            waiting = {"state": "unknown", "reason": "asking the cluster", "started": known.folder.began()}
            known.row = {"name": name, "target": known.kind, **waiting, "id": name, "folder": str(known.folder.path)}

    def _row(self, name: str, known: Known) -> Row:
        assert known.folder is not None
        about = {"id": name, "folder": str(known.folder.path)}
        try:
            row = self.sources.row(known.folder)
            return {**row, **about, **self._worth(known, row)}
        except OSError as error:  # a disk that fails, or is no longer mounted
            return {"name": name, "target": known.kind, "state": "unknown", "reason": str(error), **about}

    def _worth(self, known: Known, row: Row) -> Row:
        """MFU of the newest step, the share of time that trained, and dollars so far, as far as they are known."""
        assert known.folder is not None
        newest = newest_steps(known.folder.metrics, 1)
        last = newest[-1] if newest else {}
        started = real(row.get("started"))
        until = real(last.get("time")) if row.get("state") in ENDED else time.time()
        hours = max(0.0, until - started) / 3600 if started and until else None
        cost = known.cost_per_hour * hours if known.cost_per_hour and hours is not None else None
        return {"mfu": real(last.get("mfu")), "goodput": known.goodput, "cost_usd": cost}

    def _appraise(self, now: float) -> None:
        """Goodput needs all metrics, costs need the run file: in the background, now and then, newest runs first."""
        due = [known for known in self._known.values() if known.folder and self._is_due(known, now)]
        if self._appraising or not due or now - self._began < QUIET_SECONDS:
            return
        due.sort(key=lambda known: -(real(known.row.get("started")) or 0.0))
        self._appraising = True
        threading.Thread(target=self._count_goodput, args=(due[:MOST_APPRAISED],), name="goodput", daemon=True).start()

    def _is_due(self, known: Known, now: float) -> bool:
        metrics = known.signature[2] if known.signature else None
        is_unfit = metrics is None or metrics[1] > MOST_APPRAISED_BYTES or NOT_PLAIN in known.signature
        return not is_unfit and known.signature != known.appraised and now - known.appraised_at > APPRAISAL_SECONDS

    def _count_goodput(self, due: list[Known]) -> None:
        for known in due:
            assert known.folder is not None
            signature = known.signature
            if signature[:1] != known.appraised[:1]:
                known.cost_per_hour = _cost_per_hour(known.folder)
            try:
                known.goodput = self.sources.goodput(known.folder)
                worth = self._worth(known, known.row)
            except Exception:  # whatever lies in the folder, the others are counted
                worth = {}
            with self._lock:
                known.appraised, known.appraised_at = signature, time.monotonic()
                known.row = {**known.row, **worth}
        self._appraising = False

    def _ask_clusters(self, now: float) -> None:
        """In a thread of its own: a cluster that does not answer must not hold up the page."""
        if self._asking or now - self._asked_at < CLUSTER_SECONDS:
            return
        self._asking = True
        threading.Thread(target=self._fetch_clusters, name="clusters", daemon=True).start()

    def _fetch_clusters(self) -> None:
        with self._lock:
            pending = {name: known for name, known in self._known.items() if known.folder and known.kind not in LOCAL}
        for name, known in pending.items():
            if known.row.get("state") in ENDED and known.asked == known.signature:
                continue
            known.asked, row = known.signature, self._row(name, known)
            with self._lock:
                known.row = row
        problems = [problem for cluster in self.sources.clusters if (problem := self._fetch_cluster(cluster))]
        with self._lock:
            self.problem = "; ".join(problems) or None
            self._asking, self._asked_at = False, time.monotonic()

    def _fetch_cluster(self, cluster: str) -> str | None:
        """Its runs. One that does not answer hides no other, and its runs stay as they were: why it did not."""
        try:
            rows = {f"{cluster}/{row['name']}": row for row in self.sources.clusters[cluster]()}
        except UserError as error:
            return f"{cluster}: {error.what}" + (f" ({error.evidence})" if error.evidence else "")
        except Exception as error:  # a cluster may answer anything
            return f"{cluster}: {type(error).__name__}: {error}"[:200]
        with self._lock:
            earlier = [key for key, known in self._known.items() if not known.folder and key.startswith(f"{cluster}/")]
            for run_id in earlier:
                del self._known[run_id]
            for run_id, row in rows.items():
                if row["name"] not in self._known:
                    self._known[run_id] = Known(None, {**row, "id": run_id, "folder": None})
        return None

    def row(self, run_id: str) -> Row:
        rows = self.rows()
        if run_id not in rows:  # it may have been made since the last look
            self._listed = -math.inf
            rows = self.rows()
        if run_id not in rows:
            raise UnknownRunError(run_id)
        return rows[run_id]

    def folder(self, run_id: str) -> RunFolder:
        self.row(run_id)
        known = self._known.get(run_id)
        if known is None or known.folder is None:
            raise UnknownRunError(run_id)
        if NOT_PLAIN in known.signature:
            raise UserError(f"the folder of {run_id} is not read: {known.row['reason']}")
        return known.folder

    def view(self, run_id: str) -> RunView:
        """The view of a run, with what is new in its folder."""
        folder = self.folder(run_id)
        with self._lock:
            view = self._views.get(run_id)
            if view is None:
                view = self._views[run_id] = RunView(folder, self.sources.describe)
                self._make_room()
            is_being_read = run_id in self._readers
        if not is_being_read:
            view.refresh()
            if not view.is_complete:
                self._read_on(run_id, view)
        return view

    def _read_on(self, run_id: str, view: RunView) -> None:
        """A long file is read to its end in a thread; meanwhile the page shows what is there."""
        with self._lock:
            if run_id in self._readers:
                return
            self._readers.add(run_id)

        def read() -> None:
            while not view.is_complete and self._views.get(run_id) is view:
                view.refresh(SLICE_SECONDS)
                time.sleep(SLICE_SECONDS / 4)  # pages ask in between
            self._readers.discard(run_id)

        threading.Thread(target=read, name=f"read {run_id}", daemon=True).start()

    def _make_room(self) -> None:
        newest_first = sorted(self._views, key=lambda run_id: -self._views[run_id].used)
        rows = 0
        for position, run_id in enumerate(newest_first):
            rows += len(self._views[run_id].steps)
            if position >= MOST_VIEWS or (position and rows > MOST_ROWS_IN_VIEWS):
                del self._views[run_id]

    def detail(self, run_id: str) -> Row:
        """What the page of one run shows, the row of the list among it."""
        row = self.row(run_id)
        if row.get("folder") is None:
            return {"row": row, "time": time.time()}
        view = self.view(run_id)
        return {"row": row, "time": time.time(), **view.as_dict(end_of_row(view.folder, row))}

    def verdict(self, run_id: str) -> dict[str, Any]:
        folder = self.folder(run_id)
        if folder.logs.is_symlink():
            raise UserError("logs/ of this run is a link, which is not followed")
        return self.sources.verdict(folder, end_of_row(folder, self.row(run_id)))

    def sweeps(self) -> list[dict[str, Any]]:
        """What `windlass sweep` wrote beside the runs: which belong together, and in what they differ."""
        sweeps = []
        for path in sorted(self.root.glob("*.sweep.json"))[:MOST_SWEEPS]:
            try:
                with open_plain(path) as file:
                    record = parse_record(file.read(1 << 20))
            except OSError:
                continue
            runs = record.get("runs") if record else None
            if record and isinstance(runs, list):
                settings = {
                    name: [str(setting) for setting in run.get("settings") or []]
                    for run in runs
                    if isinstance(run, dict) and (name := words(run.get("name")))
                }
                sweeps.append({"name": words(record.get("name")) or path.name, "runs": settings})
        return sweeps

    def compared(self, run_ids: list[str]) -> dict[str, Any]:
        """Settings in which runs differ, and what each came to."""
        settings: dict[str, list[Any]] = differing([flat_settings(self.folder(run_id)) for run_id in run_ids])
        return {"settings": settings, "summaries": [self.sources.summary(self.folder(run_id)) for run_id in run_ids]}


def end_of_row(folder: RunFolder, row: Row) -> Row | None:
    """The end of the run that the row tells and its history does not."""
    if row.get("state") not in ENDED:
        return None
    return unrecorded_end(folder, JobStatus(row["state"], reason=row.get("reason"), exit_code=row.get("exit_code")))


def flat_settings(folder: RunFolder) -> dict[str, Any]:
    """Every setting of a run by its dotted key; empty where the run file cannot be read."""
    try:
        return dict(leaves(folder.load_run().model_dump(mode="json")))
    except Exception:  # a run file may hold anything: the page shows its text all the same
        return {}


def differing(settings: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """By key: the value in each run, where they are not all the same. Names always differ."""
    keys = sorted({key for setting in settings for key in setting} - {"name"})
    values = {key: [setting.get(key) for setting in settings] for key in keys}
    return {key: settings for key, settings in values.items() if any(value != settings[0] for value in settings[1:])}


def _printable(name: str) -> str:
    """A name that a browser can send back: a folder's may hold any bytes."""
    return os.fsencode(name).decode("utf-8", "replace")


def _signature(folder: RunFolder) -> tuple[tuple[int, int] | None, ...]:
    return tuple(_stamp(folder.path / name) for name in READ_FILES)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        about = path.lstat()
    except OSError:
        return None
    return (about.st_mtime_ns, about.st_size) if stat.S_ISREG(about.st_mode) else NOT_PLAIN


def _kind(folder: RunFolder) -> str:
    try:
        return folder.target_kind()
    except Exception:  # whatever lies in the folder, the others are listed
        return UNREADABLE


def _cost_per_hour(folder: RunFolder) -> float | None:
    """Dollars of all nodes for an hour, where the run file names an instance that has a published price."""
    try:
        run: Run = folder.load_run()
    except Exception:  # whatever lies in the folder, the others are listed
        return None
    instance = instances().get(str(run.resources.instance or "").removeprefix("ml."))
    return instance.on_demand.usd_per_hour * run.resources.nodes if instance and instance.on_demand else None


def to_json(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), default=str, allow_nan=False).encode()
    except ValueError:  # a setting may be infinite, which JSON cannot say
        return to_json(finite(value))
