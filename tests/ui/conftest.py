"""The server in this process; and the page as users have it: a `windlass ui` process and Debian's chromium."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.ui.folders import write_run
from windlass.cli.views.ui import sources
from windlass.ui.library import Library

SCREENSHOTS = os.environ.get("WINDLASS_SCREENSHOTS")  # a folder: docs/ui.md has its pictures from there


def windlass(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "windlass.cli.main", *map(str, arguments)]


@dataclass
class PageServer:
    url: str
    process: subprocess.Popen[str]
    started_in: float


def start_page(runs: Path, *options: str) -> PageServer:
    begin = time.monotonic()
    process = subprocess.Popen(
        windlass("ui", "--port", "0", "--json", *options),
        env={**os.environ, "WINDLASS_RUNS": str(runs)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    return PageServer(told["url"], process, time.monotonic() - begin)


def end_page(server: PageServer) -> None:
    server.process.terminate()
    server.process.wait(timeout=20)
    assert server.process.stdout is not None
    server.process.stdout.close()


class Served:
    """The real server in a thread of this process."""

    def __init__(self, root, *, host="127.0.0.1", token=None):
        import uvicorn

        from windlass.ui.server import application

        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen(64)
        self.port = self.socket.getsockname()[1]
        app = application(Library(root, sources()), host=host, token=token)
        self.server = uvicorn.Server(
            uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        )
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()

    def ask(self, path, *, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        own = {"skip_host": "host" in named, "skip_accept_encoding": "accept-encoding" in named}
        connection.putrequest(method, path, **own)  # the path goes out as it is, dots and all
        for name, value in named.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), content

    def json(self, path, **parameters):
        query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in parameters.items())
        status, _, content = self.ask(f"/api/{path}?{query}")
        return status, json.loads(content)

    def end(self):
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture
def root(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    write_run(runs, "small", steps=40)
    return runs


@pytest.fixture
def served(root):
    server = Served(root)
    yield server
    server.end()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("page") / "runs"


@pytest.fixture(scope="module")
def page_server(runs):
    runs.mkdir(exist_ok=True)
    server = start_page(runs)
    yield server
    end_page(server)


@pytest.fixture(scope="module")
def chromium():
    """Debian's browser: nothing is downloaded."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page, and what its console complained about."""

    page: Any
    base: str
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        self.page.goto(self.base + path)
        self.page.wait_for_selector("html[data-ready]")

    def complain(self, text: str) -> None:
        if "ERR_NETWORK_CHANGED" not in text:  # another test has made a network interface on this machine
            self.complaints.append(text)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait_for(self, expression: str, *, seconds: float = 240) -> None:
        """Until a JavaScript expression is true. Playwright's own waiting needs `eval`, which the page forbids."""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"not within {seconds} s: {expression}"
            self.page.wait_for_timeout(100)

    def shoot(self, name: str, *, height: int | None = None) -> None:
        """A picture for the docs, of the top of the window alone where the rest is empty."""
        if SCREENSHOTS:
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            size = self.page.viewport_size
            clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"]}
            self.page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", clip=clip)


@pytest.fixture
def open_tab(chromium, page_server):
    """Tabs whose consoles must stay silent."""
    tabs = []

    def open_one(**options):
        options.setdefault("viewport", {"width": 1360, "height": 900})
        page = chromium.new_context(**options).new_page()
        page.set_default_timeout(240_000)  # a bound: machines are slow and shared
        tab = Tab(page, page_server.url.rstrip("/"))
        page.on("console", lambda said: tab.complain(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tabs.append(tab)
        return tab

    yield open_one
    for tab in tabs:
        tab.page.context.close()
        assert tab.complaints == []
