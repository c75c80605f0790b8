"""The server of the page: a few reading requests, and a stream of what changes. It has no request that writes."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any

from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from windlass import __version__
from windlass.errors import UserError
from windlass.ui import logs
from windlass.ui.growing import open_plain
from windlass.ui.library import Library, UnknownRunError, differing, flat_settings, to_json
from windlass.ui.runs import METRICS, VALIDATION
from windlass.ui.security import Guard
from windlass.ui.series import AXES, Series

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
PAGES = ("/", "/run", "/compare")
MOST_POINTS = 4000
MOST_COMPARED = 16
MOST_STREAMS = 64  # of events at once
EVENT_SECONDS = 1.0
HEARTBEAT_SECONDS = 15.0
MOST_FILE_BYTES = 1024 * 1024


class BadRequestError(ValueError):
    pass


def application(library: Library, *, host: str = "127.0.0.1", token: str | None = None) -> Starlette:
    """The page and its data."""
    server = Server(library)
    routes = [Route(path, server.page) for path in PAGES]
    routes += [Route(f"/static/{name}", server.static(name)) for name in server.files]
    routes += [
        Route("/api/runs", server.answer(server.runs)),
        Route("/api/run", server.answer(server.run)),
        Route("/api/series", server.answer(server.series)),
        Route("/api/ranks", server.answer(server.ranks)),
        Route("/api/logs", server.answer(server.logs)),
        Route("/api/runfile", server.answer(server.run_file)),
        Route("/api/verdict", server.answer(server.verdict)),
        Route("/api/compare", server.answer(server.compare)),
        Route("/api/events", server.events),
    ]
    guard = Middleware(Guard, host=host, token=token)
    return Starlette(routes=routes, middleware=[guard, Middleware(GZipMiddleware, minimum_size=2048)])


class Server:
    def __init__(self, library: Library) -> None:
        self.library = library
        self.files = dict(_static_files())
        self.streams = 0

    async def page(self, _request: Request) -> Response:
        return Response(self.files["index.html"], media_type="text/html")

    def static(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        """Every file is a route of its own: no name that a browser sends becomes a path. Packed once, not each time."""
        content = self.files[name]
        packed = gzip.compress(content, mtime=0)
        tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        media_type = TYPES.get(name.rpartition(".")[2], "text/plain")

        async def serve(request: Request) -> Response:
            headers = {"etag": tag, "cache-control": "no-cache", "vary": "Accept-Encoding"}
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            if "gzip" in request.headers.get("accept-encoding", ""):
                return Response(packed, media_type=media_type, headers={**headers, "content-encoding": "gzip"})
            return Response(content, media_type=media_type, headers=headers)

        return serve

    def answer(self, make: Callable[[Request], Any]) -> Callable[[Request], Response]:
        """JSON of what `make` returns; in a thread of its own, as starlette calls what is not `async`."""

        def serve(request: Request) -> Response:
            status, value = 200, None
            try:
                value = make(request)
            except UnknownRunError as error:
                status, value = 404, {"error": f"there is no run {error.args[0]!r}, or no longer"}
            except BadRequestError as error:
                status, value = 400, {"error": str(error)}
            except UserError as error:
                status, value = 500, error.as_dict()
            except OSError as error:  # a folder that is being deleted, a disk that went away
                status, value = 500, {"error": f"the run folder cannot be read: {error.strerror}"}
            return Response(to_json(value), status, media_type="application/json")

        return serve

    # What a page asks for.

    def runs(self, _request: Request) -> Any:
        library = self.library
        return {
            "runs": list(library.rows().values()),
            "sweeps": library.sweeps(),
            "problem": library.problem,
            "root": str(library.root),
            "version": __version__,
            "time": time.time(),
        }

    def run(self, request: Request) -> Any:
        return self.library.detail(_run_id(request))

    def series(self, request: Request) -> Any:
        """Points of some metrics of one run, between two places of an axis, thinned to what a chart can show."""
        view = self.library.view(_run_id(request))
        axis = request.query_params.get("axis", "step")
        if axis not in AXES:
            raise BadRequestError(f"axis is one of {', '.join(AXES)}")
        most_points = int(_number(request, "points", 1000, 10, MOST_POINTS))
        weight = _number(request, "smooth", 0.0, 0.0, 0.9999)
        begin, end = _number(request, "from", -math.inf), _number(request, "to", math.inf)
        asked = dict.fromkeys(request.query_params.getlist("metric") or METRICS)
        curves: dict[str, Any] = {}
        with view.lock:
            for name in asked:
                series, column = _column(view.steps, view.validation, name)
                rows = series.rows_between(axis, begin, end)
                xs, ys = series.thinned(column, axis, rows, most_points)
                curves[name] = {"x": xs, "y": ys}
                if weight and series is view.steps:
                    curves[name]["smooth"] = series.smoothed(column, axis, rows, most_points // 2, weight)
            starts = [attempt.first_step for attempt in view.attempts.values() if attempt.first_step is not None]
            return {
                "curves": curves,
                "restarts": [_at(view.steps, axis, step) for step in starts[1:]],
                "complete": view.is_complete,
                "num_steps": len(view.steps) * view.steps.stride,
                "version": view.version,
            }

    def ranks(self, request: Request) -> Any:
        view = self.library.view(_run_id(request))
        with view.lock:
            return view.ranks.heat_map(view.num_ranks)

    def logs(self, request: Request) -> Any:
        folder = self.library.folder(_run_id(request))
        source = request.query_params.get("source")
        search = request.query_params.get("search", "")[:200]
        size = logs.size_of(folder)  # before: what is written meanwhile is news
        return {**logs.read_logs(folder, source=source, search=search), "size": size}

    def run_file(self, request: Request) -> Any:
        folder = self.library.folder(_run_id(request))
        with open_plain(folder.run_file) as file:
            text = file.read(MOST_FILE_BYTES).decode("utf-8", "replace")
        against = request.query_params.get("against")
        answer: dict[str, Any] = {"text": text}
        if against:
            other = self.library.folder(against)
            answer["differences"] = differing([flat_settings(folder), flat_settings(other)])
        return answer

    def verdict(self, request: Request) -> Any:
        return self.library.verdict(_run_id(request))

    def compare(self, request: Request) -> Any:
        return self.library.compared(request.query_params.getlist("id")[:MOST_COMPARED])

    # What changes.

    async def events(self, request: Request) -> Response:
        """Server-sent events: rows that changed and, of the runs that a page shows, that there is more to fetch."""
        if self.streams >= MOST_STREAMS:
            return Response(b'{"error":"too many pages are open"}', 503, media_type="application/json")
        self.streams += 1  # now: many may come at once
        watched = request.query_params.getlist("id")[:MOST_COMPARED]
        return EventStream(self._stream(watched), ended=self._stream_ended)

    def _stream_ended(self) -> None:
        self.streams -= 1

    async def _stream(self, watched: list[str]) -> AsyncIterator[bytes]:
        sent: dict[str, Any] = {}
        spoke = time.monotonic()
        yield b"retry: 2000\n\n"
        while True:
            state = await run_sync(self._state, watched)
            changed = {key: value for key, value in state.items() if key not in sent or sent[key] != value}
            gone = [key for key in sent if key not in state]
            if changed or gone:
                spoke = time.monotonic()
                yield b"event: change\ndata: " + to_json({"changed": changed, "gone": gone}) + b"\n\n"
            elif time.monotonic() - spoke > HEARTBEAT_SECONDS:
                spoke = time.monotonic()
                yield b": still here\n\n"
            sent = state
            await asyncio.sleep(EVENT_SECONDS)

    def _state(self, watched: list[str]) -> dict[str, Any]:
        """What may change, by a key each: the row of a run; and of watched runs what tells that there is more."""
        rows = self.library.rows()
        if not watched:
            return {f"row {run_id}": row for run_id, row in rows.items()}
        state: dict[str, Any] = {}
        for run_id in watched:
            row = state[f"row {run_id}"] = rows.get(run_id)  # None: it is gone, also for a page that comes back
            if row is None or row.get("folder") is None:
                continue
            try:
                view = self.library.view(run_id)
                state[f"view {run_id}"] = {"version": view.version, "complete": view.is_complete}
                state[f"logs {run_id}"] = logs.size_of(view.folder)
            except (UnknownRunError, OSError):
                continue
        return state


class EventStream(StreamingResponse):
    """Events for as long as somebody listens; then `ended` is called, also where nothing was sent."""

    def __init__(self, content: AsyncIterator[bytes], *, ended: Callable[[], None]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self.ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


def _static_files() -> list[tuple[str, bytes]]:
    folder = resources.files(__package__).joinpath("static")
    files = [(path.name, path) for path in folder.iterdir() if path.is_file()]
    files += [(f"vendor/{path.name}", path) for path in folder.joinpath("vendor").iterdir() if path.is_file()]
    return [(name, file.read_bytes()) for name, file in files if name.rpartition(".")[2] in TYPES]


def _run_id(request: Request) -> str:
    run_id = request.query_params.get("id")
    if not run_id:
        raise BadRequestError("no id is given")
    return run_id


def _number(request: Request, name: str, default: float, low: float = -math.inf, high: float = math.inf) -> float:
    text = request.query_params.get(name)
    if text in (None, ""):
        return default
    try:
        number = float(str(text))
    except ValueError:
        raise BadRequestError(f"{name} is no number") from None
    if math.isnan(number):
        raise BadRequestError(f"{name} is no number")
    return min(max(number, low), high)


def _column(steps: Series, validation: Series, name: str) -> tuple[Series, str]:
    if name in METRICS:
        return steps, name
    column = name.removeprefix("validation_")
    if column != name and column in VALIDATION:
        return validation, column
    raise BadRequestError(f"there is no metric {name[:50]!r}")


def _at(series: Series, axis: str, step: int) -> float:
    first, _ = series.rows_between("step", step, None)
    values = series.axis(axis)
    return float(step if axis == "step" else values[min(first, len(values) - 1)]) if len(values) else 0.0
