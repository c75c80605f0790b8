"""The API server over plain HTTP: JSON in, JSON out, with a client certificate."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MERGE = "application/merge-patch+json"


class ApiError(RuntimeError):
    """What the API server answered instead."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def patiently(condition: Callable[[], bool]) -> bool:
    """False as well while the server is too busy to say."""
    try:
        return condition()
    except ApiError as error:
        if error.code == 429 or error.code >= 500:
            return False
        raise
    except (OSError, http.client.HTTPException):
        return False


class Api:
    """May be used by several threads: each has a connection of its own, and keeps it."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = json.loads(kubeconfig.read_text())
        cluster, user = configuration["clusters"][0]["cluster"], configuration["users"][0]["user"]
        self.address = urlsplit(cluster["server"]).netloc
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self.context = ssl.create_default_context(cadata=authority)
        with tempfile.NamedTemporaryFile() as pair:  # the ssl module reads a client's key only from a file
            for part in ("client-certificate-data", "client-key-data"):
                pair.write(base64.b64decode(user[part]))
            pair.flush()
            self.context.load_cert_chain(pair.name)
        self._thread = threading.local()

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> dict[str, Any]:
        text = self._text(method, path, body, kind)
        return dict(json.loads(text))

    def get(self, path: str) -> dict[str, Any]:
        return self.request("GET", path)

    def exists(self, path: str) -> bool:
        try:
            self.get(path)
        except ApiError as error:
            if error.code == 404:
                return False
            raise
        return True

    def post(self, path: str, body: Any) -> dict[str, Any]:
        return self.request("POST", path, body)

    def merge(self, path: str, body: Any) -> dict[str, Any]:
        return self.request("PATCH", path, body, MERGE)

    def delete(self, path: str, grace_seconds: int | None = None) -> None:
        query = "" if grace_seconds is None else f"?gracePeriodSeconds={grace_seconds}"
        try:
            self.request("DELETE", path + query)
        except ApiError as error:
            if error.code != 404:
                raise

    def ready(self) -> bool:
        try:
            return self._text("GET", "/readyz") == "ok"
        except (OSError, ApiError, http.client.HTTPException):
            return False

    def watch(self, path: str, version: str, seconds: int = 60) -> Iterator[dict[str, Any]]:
        """Changes since a version, until the server ends the stream."""
        query = f"?watch=true&resourceVersion={version}&timeoutSeconds={seconds}&allowWatchBookmarks=true"
        connection = self._connect(seconds + 10)
        try:
            connection.request("GET", path + query)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _error(answer.status, answer.read().decode(errors="replace"))
            for line in answer:
                yield json.loads(line)
        finally:
            connection.close()

    def _text(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": kind}
        connection = getattr(self._thread, "connection", None)
        if connection is None:
            connection = self._thread.connection = self._connect(30)
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            connection.close()  # the next request opens it anew
            raise
        if answer.status >= 300:
            raise _error(answer.status, text)
        return str(text)

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self.address, context=self.context, timeout=timeout)


def _error(code: int, text: str) -> ApiError:
    try:
        return ApiError(code, json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return ApiError(code, text)
