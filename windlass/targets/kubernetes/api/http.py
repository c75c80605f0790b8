"""The Kubernetes API over HTTP: objects as dicts, watches, log streams, on one bounded pool of connections."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import httpx2

from windlass.common.files import parse_record
from windlass.common.retrying import doubling, retried
from windlass.errors import UserError
from windlass.targets.kubernetes.api.credentials import Credentials, impersonation, tls
from windlass.targets.kubernetes.api.errors import (
    RefusedError,
    UnreachableError,
    from_status,
    not_the_api,
    refused,
    unreachable,
)
from windlass.targets.kubernetes.api.kubeconfig import Access

Object = dict[str, Any]
Params = Mapping[str, str | int | list[str]]

MAX_CONNECTIONS = 160  # 128 log streams, the watches, and room for questions
PAGE = 250  # objects in one answer: a thousand pods come in four
ALL_PODS = "/api/v1/pods"
LARGE_PAGE = 2500  # of nodes and pods of all namespaces: few requests count more than small answers
CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
WATCH_SECONDS = 240  # the server ends a watch after this long; it goes on from where it was
WATCH_SILENCE_SECONDS = 90.0  # bookmarks come every minute; a watch without them is opened anew
SILENCE_SECONDS = WATCH_SECONDS + 60.0  # of a log: its pod may have nothing to say
ATTEMPTS = 4
FIRST_WAIT = 0.25
LONGEST_WAIT = 10.0
TRANSIENT = frozenset((429, 500, 502, 503, 504))
NO_WEBHOOK = "failed calling webhook"
MERGE_PATCH = "application/merge-patch+json"
JSON, ANYTHING = "application/json", "*/*"


class GoneError(Exception):
    """The place in a watch is too old for the server: what is there must be listed anew."""


class Api:
    """One cluster, as one user. Safe to use from many threads."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.num_requests = 0
        self._counting, self._connecting = threading.Lock(), threading.Lock()
        self.credentials = Credentials(access)
        name = access.cluster.get("tls-server-name")
        self._extensions: dict[str, Any] = {"sni_hostname": str(name)} if name else {}
        self._pair = self.credentials.pair()
        self._client = _client(access, self.credentials, self._pair)
        self._former: list[httpx2.Client] = []  # of an earlier certificate; streams may still be open on them
        self._answers: dict[Any, Object] | None = None

    def close(self) -> None:
        for client in (self._client, *self._former):
            client.close()

    @property
    def client(self) -> httpx2.Client:
        """The connections; new ones once a credential plugin has issued another certificate."""
        pair = self.credentials.pair()
        with self._connecting:
            if pair != self._pair:
                self._former.append(self._client)
                self._client, self._pair = _client(self.access, self.credentials, pair), pair
            return self._client

    def ask_whether_there(self, seconds: float) -> None:
        """Raise UnreachableError where nothing answers within so long; a refusal is an answer too."""
        timeout = httpx2.Timeout(seconds)
        self._send(self._request("GET", "/version", {}, timeout=timeout))

    @contextlib.contextmanager
    def remembering(self) -> Iterator[None]:
        """Send no question twice while it lasts, but for all pods: thirty thousand answers would take gigabytes."""
        self._answers = {}
        try:
            yield
        finally:
            self._answers = None

    def get(self, path: str, **params: str | int) -> Object:
        kept, key = self._answers, (path, *sorted(params.items()))
        if kept is None or path == ALL_PODS:
            return self._call("GET", path, params)
        if key not in kept:
            kept[key] = self._call("GET", path, params)
        return kept[key]

    def find(self, path: str) -> Object | None:
        """The object at a path, or None if there is none."""
        try:
            return self.get(path)
        except RefusedError as error:
            if error.code == 404:
                return None
            raise

    def pages(self, path: str, **params: str | int) -> Iterator[Object]:
        """A list in pages; each has `items` and the list's `metadata`."""
        query: dict[str, str | int] = {"limit": PAGE, **params}
        while True:
            try:
                page = self.get(path, **query)
                yield page
                further = page.get("metadata", {}).get("continue")
            except RefusedError as error:
                # the snapshot that the pages were cut from is gone; the server offers to go on in the present one
                further = error.further if error.code == 410 else None
                if not further:
                    raise
            if not further:
                return
            query["continue"] = further

    def items(self, path: str, **params: str | int) -> Iterator[Object]:
        for page in self.pages(path, **params):
            yield from page.get("items") or ()

    def create(self, path: str, value: Object, *, dry_run: bool = False) -> Object:
        """Create one object; a field that its kind does not have is an error, not a surprise."""
        params = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self._call("POST", path, params, value)

    def patch(self, path: str, change: Object) -> Object:
        return self._call("PATCH", path, {"fieldValidation": "Strict"}, change, content_type=MERGE_PATCH)

    def delete(self, path: str, *, grace: int | None = None, uid: str | None = None) -> Object | None:
        """Delete one object, with `uid` that very one; None if it was not there."""
        options: Object = {"propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            return self._call("DELETE", path, {}, options)
        except RefusedError as error:
            if error.code == 404:
                return None
            raise

    def delete_all(self, path: str, selector: str, *, grace: int) -> None:
        """Delete every object of a list that has the labels, with one request."""
        options: Object = {"propagationPolicy": "Background", "gracePeriodSeconds": grace}
        self._call("DELETE", path, {"labelSelector": selector}, options)

    def watch(
        self,
        path: str,
        version: str,
        halt: Halt | None = None,
        *,
        opened: Callable[[], None] = lambda: None,
        **params: str | int,
    ) -> Iterator[Object]:
        """Changes since `version` until the server ends the watch; raises GoneError when `version` is too old.

        Each has a `type` and an `object` with a resourceVersion; whatever else comes raises UnreachableError.
        """
        query: dict[str, str | int] = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_SECONDS,
            "resourceVersion": version,
            **params,
        }
        try:
            for line in self.lines(path, query, halt, opened):
                change = parse_change(line)
                if change is None:
                    raise not_the_api(self.access, line, f"a watch of {path} was cut or changed on its way")
                if change["type"] == "ERROR":
                    if change["object"].get("code") == 410:
                        raise GoneError
                    raise from_status(self.access, change["object"], f"to watch {path}")
                yield change
        except RefusedError as error:
            if error.code == 410:
                raise GoneError from None
            raise

    def lines(
        self, path: str, params: Params, halt: Halt | None = None, opened: Callable[[], None] = lambda: None
    ) -> Generator[bytes, None, None]:
        """The lines of a long answer as they come, without their ends; `halt` breaks it off from another thread.

        Only the newline ends a line: progress bars write carriage returns, and those are text.
        """
        with self.stream(path, params, halt) as response:
            opened()
            rest = b""
            try:
                for chunk in response.iter_bytes():
                    *whole, rest = (rest + chunk).split(b"\n")
                    yield from whole
            except httpx2.TransportError as error:
                if halt is not None and halt.requested:
                    return
                raise unreachable(self.access, error) from None
            if rest:
                yield rest

    @contextlib.contextmanager
    def stream(self, path: str, params: Params, halt: Halt | None = None) -> Iterator[httpx2.Response]:
        """A response whose body is read by the caller."""
        silence = (
            WATCH_SILENCE_SECONDS if "watch" in params else SILENCE_SECONDS if "follow" in params else READ_SECONDS
        )
        request = self._request("GET", path, params, timeout=httpx2.Timeout(silence, connect=CONNECT_SECONDS))
        response = self._send(request, stream=True)
        try:
            if response.status_code >= 400:
                response.read()
                raise refused(self.access, response, response.content)
            if response.headers.get("Content-Type", "").startswith("text/html"):
                raise not_the_api(self.access, response.read(), f"to {path} came a page for people")
            with halt.guarding(response) if halt is not None else contextlib.nullcontext():
                yield response
        finally:
            response.close()

    @contextlib.contextmanager
    def websocket(
        self, path: str, params: list[tuple[str, str | int | float | bool | None]], protocols: list[str]
    ) -> Iterator[Any]:
        from httpx2.websockets import WebSocketClient, WebSocketSession, WebSocketUpgradeError

        class Session(WebSocketSession):
            def __init__(self, stream: Any, **options: Any) -> None:
                super().__init__(SharedStream(stream), **options)  # type: ignore[arg-type]

        self._count()
        sockets = WebSocketClient(self.client, max_message_size_bytes=2**24, session_class=Session)
        try:
            with sockets.connect(
                path,
                params=params,
                subprotocols=protocols,
                headers={"Accept": ANYTHING},
                extensions=self._extensions,
            ) as session:
                try:
                    yield session
                finally:
                    session.stream.close()  # or httpx2 sends a close frame, and waits while the peer reads nothing
        except WebSocketUpgradeError as error:
            raise self._why_no_upgrade(path, params, error.response) from None
        except httpx2.TransportError as error:
            raise unreachable(self.access, error) from None

    def _why_no_upgrade(self, path: str, params: Any, response: httpx2.Response) -> RefusedError:
        """A refused websocket comes without its reason; the same question as a plain one is refused with it.

        Kubernetes 1.36 wants the verb `create` for it, earlier ones `get`: where a plain GET is not forbidden, a POST
        is. Neither carries anything out, for a command needs a connection that can be spoken over.
        """
        for method in ("GET", "POST") if response.status_code in (401, 403, 404) else ():
            try:
                self._call(method, path, dict(params))
            except RefusedError as error:
                if error.code == response.status_code:
                    return error
        return refused(self.access, response, b"")

    def _call(
        self, method: str, path: str, params: Params, body: Object | None = None, content_type: str = JSON
    ) -> Object:
        """One question and its answer; busy or restarting servers are asked again."""

        def ask() -> Object:
            response = self._send(self._request(method, path, params, body, content_type))
            if response.status_code >= 400:
                raise refused(self.access, response, response.content)
            answer = parse_record(response.content)
            if answer is None:
                raise not_the_api(self.access, response.content, f"{method} {path} was not answered with JSON")
            return answer

        def pause_after(error: Exception, failures: int) -> float | None:
            if failures == ATTEMPTS or not _may_ask_again(error, is_question=method == "GET"):
                return None
            pause = error.retry_after if isinstance(error, RefusedError) else None
            return min(doubling(FIRST_WAIT, failures) if pause is None else pause, LONGEST_WAIT)

        return retried(ask, pause_after=pause_after)

    def _request(
        self,
        method: str,
        path: str,
        params: Params,
        body: Object | None = None,
        content_type: str = JSON,
        timeout: httpx2.Timeout | None = None,
    ) -> httpx2.Request:
        return self.client.build_request(
            method,
            path,
            params={key: value for key, value in params.items() if value is not None},
            content=json.dumps(body).encode() if body is not None else None,
            headers={"Content-Type": content_type} if body is not None else None,
            extensions=self._extensions or None,
            timeout=timeout if timeout is not None else httpx2.USE_CLIENT_DEFAULT,
        )

    def _send(self, request: httpx2.Request, *, stream: bool = False) -> httpx2.Response:
        self._count()
        client = self.client
        try:
            response = client.send(request, stream=stream)
            if response.status_code == 401 and self.client is not client:
                response.close()  # that was the old certificate's connection
                response = self.client.send(request, stream=stream)
            return response
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise unreachable(self.access, error) from error
        except ValueError as error:  # a server's address that is none
            raise unreachable(self.access, error) from error

    def _count(self) -> None:
        with self._counting:
            self.num_requests += 1


def _may_ask_again(error: Exception, *, is_question: bool) -> bool:
    """What a webhook kept off was not carried out, nor was a 429; of the rest only a question is safe again."""
    if isinstance(error, RefusedError):
        not_done = error.code == 429 or NO_WEBHOOK in error.message
        return not_done or (is_question and error.code in TRANSIENT)
    if isinstance(error, UnreachableError):
        return (is_question and not error.answered) or isinstance(error.__cause__, httpx2.ConnectError)
    return False


def parse_change(line: bytes) -> Object | None:
    """One line of a watch; None where it is none."""
    change = parse_record(line)
    value = change.get("object") if change else None
    if change is None or not isinstance(change.get("type"), str) or not isinstance(value, dict):
        return None
    metadata = value.get("metadata")
    has_version = isinstance(metadata, dict) and isinstance(metadata.get("resourceVersion"), str)
    return change if has_version or change["type"] == "ERROR" else None


def _client(access: Access, credentials: Credentials, pair: tuple[str, str] | None) -> httpx2.Client:
    proxy = access.cluster.get("proxy-url") or None
    try:
        return httpx2.Client(
            base_url=access.server,
            auth=credentials,
            verify=tls(access, pair),
            proxy=str(proxy) if proxy else None,
            timeout=httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS, pool=READ_SECONDS),
            limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
            headers=[(b"User-Agent", b"windlass"), (b"Accept", JSON.encode()), *impersonation(access)],
        )
    except ImportError:  # httpx2 speaks to SOCKS proxies with a library of its own
        raise UserError(
            f"the way to the cluster of the context {access.context} is a SOCKS proxy, and a library for it is missing",
            evidence=f"proxy-url: {proxy}" if proxy else "$ALL_PROXY, $HTTPS_PROXY or $HTTP_PROXY names it",
            fix="pip install socksio",
        ) from None
    except (ValueError, TypeError, httpx2.InvalidURL) as error:
        raise UserError(
            f"the address of the cluster or of its proxy in the context {access.context} is none",
            evidence=f"server: {access.server}" + (f", proxy-url: {proxy}" if proxy else "") + f": {error}",
            fix=f"kubectl config set-cluster NAME --server=https://HOST    in {access.source}",
        ) from None


class Halt:
    """Breaks off streams that other threads are waiting on."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._open: set[httpx2.Response] = set()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep, but not longer than until it is asked to halt; True if it was."""
        return self._event.wait(seconds)

    def now(self) -> None:
        self._event.set()
        self.break_streams()

    def break_streams(self) -> None:
        """End what is open, so that it is opened anew: after a silence nobody knows which connections are dead."""
        with self._lock:
            streams = list(self._open)
        for response in streams:
            _shut(response.extensions.get("network_stream"))

    @contextlib.contextmanager
    def guarding(self, response: httpx2.Response) -> Iterator[None]:
        with self._lock:
            self._open.add(response)
            late = self._event.is_set()
        try:
            if late:
                _shut(response.extensions.get("network_stream"))
            yield
        finally:
            with self._lock:
                self._open.discard(response)


class SharedStream:
    """A connection that several threads use; its file descriptor is closed once none of them is inside a call.

    httpx2 closes it while threads of its own or of ours still read and write. The next connection gets the same number,
    and the old reader takes bytes out of it (seen as "wrong version number" or "bad record mac"), or the old writer
    puts some in.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._users, self._is_closed = stream, 0, False
        self._idle = threading.Condition()

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        import httpcore2  # httpx2 brings it; at the top it would be missed in its place

        with self._used(httpcore2.ReadError):
            return bytes(self._stream.read(max_bytes, timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        import httpcore2

        with self._used(httpcore2.WriteError):
            self._stream.write(buffer, timeout)

    def close(self) -> None:
        with self._idle:
            self._is_closed = True
            _shut(self._stream)  # wakes whoever waits for a byte, or for room to write one
            self._idle.wait_for(lambda: not self._users)
            self._stream.close()

    @contextlib.contextmanager
    def _used(self, refusal: type[Exception]) -> Iterator[None]:
        with self._idle:
            if self._is_closed:
                raise refusal("the connection was closed here")
            self._users += 1
        try:
            yield
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()


def _shut(network: Any) -> None:
    """End a connection: only that wakes a thread which waits for its next byte."""
    wire = network.get_extra_info("socket") if network is not None else None
    if wire is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(wire, socket.SHUT_RDWR)  # an SSLSocket's own would drop its state under the reader
