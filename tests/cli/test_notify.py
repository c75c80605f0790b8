"""Notices reach a real HTTP server and a real SMTP server, once each, and no failure of theirs is training's."""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.spec.run import NotifySection
from windlass.targets.launch.notifications import Ledger, Notice, mail, notices, post, receivers, settings_for

SECRET = "hook-7f3a9c-secret"


class Hook:
    """A webhook that answers with the given codes, then with 200."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.received: list[dict[str, Any]] = []
        self.codes: list[int] = []
        self.delay_s = 0.0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(hook.delay_s)
                code = hook.codes.pop(0) if hook.codes else 200
                if code == 200:
                    hook.received.append(json.loads(body))
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self.server.server_port}/services/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.server.shutdown()


class MailHandler(socketserver.StreamRequestHandler):
    """As much of SMTP as a client needs."""

    def handle(self) -> None:
        def say(line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

        say("220 here")
        while line := self.rfile.readline().decode().strip():
            verb = line.split(":")[0].split()[0].upper()
            if verb == "DATA":
                say("354 go on")
                text = b""
                while not text.endswith(b"\r\n.\r\n"):
                    text += self.rfile.readline()
                self.server.received.append(text.decode())  # type: ignore[attr-defined]
                say("250 taken")
            elif verb == "QUIT":
                say("221 bye")
                return
            elif verb == "RCPT" and "nobody" in line:
                say("550 no such user")
            else:
                say("250 yes")


@pytest.fixture
def mail_server() -> Iterator[Any]:
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), MailHandler)
    server.received = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


NOTICE = Notice("k", "small", "failure", 1700000000.0, "small failed", "rank 1 was killed")


def test_a_webhook_gets_what_slack_understands(hook: Hook) -> None:
    post(hook.url, NOTICE)
    (told,) = hook.received
    assert told["text"] == "small failed"
    (attachment,) = told["attachments"]
    assert (attachment["text"], attachment["color"]) == ("rank 1 was killed", "danger")
    assert {field["title"]: field["value"] for field in attachment["fields"]} == {"run": "small", "event": "failure"}


def test_an_email_arrives_and_a_refusal_is_an_error(mail_server: Any) -> None:
    port = mail_server.server_address[1]
    section = NotifySection(
        email=("a@example.com",), sender="w@example.com", smtp_host="127.0.0.1", smtp_port=port, smtp_security="none"
    )
    mail(section, None, NOTICE)
    assert "Subject: small failed" in mail_server.received[0]
    assert "rank 1 was killed" in mail_server.received[0]
    with pytest.raises(OSError, match="no such user"):
        mail(section.model_copy(update={"email": ("nobody@example.com",)}), None, NOTICE)
    with pytest.raises(OSError, match=r"STARTTLS"):
        mail(section.model_copy(update={"smtp_security": "starttls"}), None, NOTICE)
    assert len(mail_server.received) == 1, "nothing was sent unencrypted that was to be encrypted"


def test_a_server_that_fails_hangs_or_is_gone_is_given_up(hook: Hook, tmp_path: Path) -> None:
    (receiver,) = receivers(NotifySection(webhook="HOOK"), {"HOOK": hook.url})
    ledger = Ledger(RunFolder(tmp_path), since=0.0)
    hook.codes = [500, 503]
    assert ledger.send(NOTICE, receiver, pause_s=0.01) is None, "the third time it is taken"
    hook.codes = [500] * 3
    other = Notice("k2", "small", "end", 1.0, "small is finished")
    assert ledger.send(other, receiver, pause_s=0.01) == "it answered 500 Internal Server Error"
    hook.delay_s = 1.0
    with pytest.raises(OSError, match="timed out"):
        post(hook.url, NOTICE, timeout_s=0.2)
    with pytest.raises(OSError, match="refused") as caught:
        post(f"http://127.0.0.1:9/{SECRET}", NOTICE)
    assert SECRET not in str(caught.value)
    again = Ledger(RunFolder(tmp_path), since=50.0)
    assert again.has(NOTICE, receiver)
    assert again.has(other, receiver), "what was given up is not tried for ever"
    assert again.since == 0.0
    assert SECRET not in (tmp_path / "notifications.jsonl").read_text()


def test_what_is_worth_telling() -> None:
    history = [
        {"time": 1.0, "event": "launched", "attempt": 1},
        {"time": 2.0, "event": "hang", "attempt": 1, "seconds": 61.0, "why": "rank 1 on a is behind"},
        {"time": 3.0, "event": "restart", "attempt": 2, "why": "rank 1 was killed; token hf_abcdefghijklmnopqrstuvwx"},
        {"time": 4.0, "event": "exit", "state": "failed", "reason": "given up"},
        {"time": 5.0, "event": "exit", "state": "finished", "reason": None},
        {"event": "exit"},
    ]
    told = notices("small", history)
    assert [notice.occasion for notice in told] == ["stall", "retry", "failure", "end"]
    assert told[0].text == "small made no step for 61.0 s\nrank 1 on a is behind"
    assert "hf_abcdef" not in told[1].text
    assert len({notice.key for notice in told}) == 4


def test_a_secret_in_the_run_file_is_refused(windlass: Any, run_file: Path) -> None:
    answer = windlass("run", run_file, "notify.webhook=https://hooks.example.com/T1/B2/x", "--dry-run")
    assert answer.code == 2
    assert "NAME of the environment variable" in answer.err
    missing = windlass("run", run_file, "notify.webhook=NO_SUCH_HOOK", "--yes", "--quiet")
    assert missing.code == 2
    assert "NO_SUCH_HOOK, which is not set" in missing.err
    assert not list(Path("runs").glob("*/supervisor.json")), "nothing was started"


def folder_of(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "small")
    run = {"name": "small", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}}
    folder.create(Run.model_validate({**run, "notify": {"webhook": "HOOK"}}))
    return folder


def watch(tmp_path: Path, hook: Hook, since: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "windlass.cli.main", "notify", "small", "--since", str(since)]
    environment = {**os.environ, "HOOK": hook.url, "WINDLASS_RUNS": str(tmp_path / "runs")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.Popen(command, env=environment, cwd=tmp_path)


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_every_event_is_sent_once_though_the_watcher_is_killed(hook: Hook, tmp_path: Path) -> None:
    """A run that is under way (this process holds its lock); its watcher is killed with SIGKILL and started again."""
    from windlass.common.locks import locked

    folder, since = folder_of(tmp_path), time.time() - 10
    with locked(folder.path / ".lock"):
        folder.record("launched", attempt=1)
        folder.record("restart", attempt=2, why="rank 1 was killed by SIGKILL")
        first = watch(tmp_path, hook, since)
        until(lambda: any(one.get("state") == "sent" for one in read_json_lines(folder.path / "notifications.jsonl")))
        first.kill()
        first.wait()
        folder.record("hang", attempt=2, seconds=61.0, why="rank 1 is behind")
        second = watch(tmp_path, hook, time.time())
        until(lambda: len(hook.received) == 2)
    folder.record("exit", state="failed", code=1, reason="given up")
    assert second.wait(60) == 0
    assert [one["text"] for one in hook.received] == [
        "small starts again",
        "small made no step for 61.0 s",
        "small failed",
    ]


@pytest.mark.slow
def test_a_webhook_that_refuses_is_told_where_people_look(hook: Hook, tmp_path: Path, windlass: Any) -> None:
    folder, since = folder_of(tmp_path), time.time() - 10
    folder.record("launched", attempt=1)
    folder.record("exit", state="failed", code=1, reason="given up")
    hook.codes = [404] * 3
    assert watch(tmp_path, hook, since).wait(60) == 1
    assert not hook.received
    told = "webhook at 127.0.0.1 was not told (failure): it answered 404 Not Found"
    for words in (["show", folder.path], ["show", folder.path, "--history"]):
        assert told in " ".join(windlass(*words).out.split())
    (record,) = [one for one in read_json_lines(folder.history) if one["event"] == "notice-failed"]
    assert SECRET not in json.dumps(record)
    assert windlass("show", folder.path, "--json").json["state"] == "failed"


@pytest.mark.slow
def test_a_run_whose_supervisor_was_killed_is_told_once(hook: Hook, tmp_path: Path) -> None:
    """Nobody wrote its end down; the next start does, and that is no news."""
    folder, since = folder_of(tmp_path), time.time() - 10
    folder.record("launched", attempt=1, job="1-1")
    supervisor = {"pid": 2**22 - 1, "start_time": 1, "host": "here"}
    (folder.path / "supervisor.json").write_text(json.dumps({**supervisor, **_this_machine()}))
    assert watch(tmp_path, hook, since).wait(60) == 0
    assert watch(tmp_path, hook, since).wait(60) == 0
    assert [one["text"] for one in hook.received] == ["small failed"]


def _this_machine() -> dict[str, Any]:
    from dataclasses import asdict

    from windlass.targets.launch.machine import this_host

    return asdict(this_host())


def test_the_users_own_file_holds_for_a_run_that_is_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "notify.yaml"
    own.write_text("webhook: TEAM_HOOK\nevents: [failure]\n")
    monkeypatch.setenv("WINDLASS_NOTIFY", str(own))
    values = {"name": "r", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}}
    for notify, expected in (
        ({}, ("TEAM_HOOK", ("failure",))),
        ({"webhook": "MY_HOOK"}, ("MY_HOOK", ("failure",))),
        ({"events": []}, ("TEAM_HOOK", ())),
    ):
        folder = RunFolder(tmp_path / "runs" / "r")
        folder.create(Run.model_validate({**values, "notify": notify}))
        section = settings_for(folder.load_run().notify)
        assert (section.webhook, tuple(section.events)) == expected


def test_people_are_told_of_a_full_disk(hook: Hook, small_disk: Callable[[int], Path]) -> None:
    folder = RunFolder(small_disk(2**18) / "r")
    folder.path.mkdir()
    with (folder.path / "filled").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    to = receivers(NotifySection(webhook="HOOK"), {"HOOK": hook.url})
    ledger = Ledger(folder, since=0.0)
    told = [Notice(f"{number}", "r", "failure", 1.0, "r failed", "the disk is full") for number in range(2)]
    for _ in range(2):
        ledger.send_new(told, ("failure",), to)
    assert len(hook.received) == 2
    (folder.path / "filled").unlink()
    ledger.send_new([Notice("3", "r", "failure", 2.0, "r failed")], ("failure",), to)
    assert [record.get("state") for record in read_json_lines(ledger.path)] == [None, *["claimed", "sent"] * 3]
