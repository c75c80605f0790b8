"""Tell people what happens to a run: by webhook and e-mail, each event once, whoever is killed meanwhile.

What was sent is in the run folder (notifications.jsonl), so that a watcher that is started again repeats nothing; only
one that is killed between a sending and its record sends that once more. Nothing here is part of the run: it reads the
history beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import smtplib
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import yaml

from windlass.common.files import append_json_line, read_json_lines, real, words
from windlass.common.retrying import doubling, retried
from windlass.diagnose.secrets import clean_text
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec.run import NotifySection, Occasion

LEDGER = "notifications.jsonl"
TIMEOUT_S = 10.0
TRIES = 3
PAUSE_S = 2.0  # before the second try, doubled
CONFIG_VARIABLE = "WINDLASS_NOTIFY"
SETTINGS_VARIABLE = "WINDLASS_NOTIFY_SETTINGS"  # in a retry loop on another machine: the settings, as JSON
COLOURS: Mapping[Occasion, str] = {"end": "good", "failure": "danger", "retry": "warning", "stall": "warning"}


@dataclass(frozen=True)
class Notice:
    """Something that happened to a run."""

    key: str  # the same for the same event, whoever reads it
    run: str
    occasion: Occasion
    time: float
    title: str
    detail: str | None = None

    @property
    def text(self) -> str:
        return f"{self.title}\n{self.detail}" if self.detail else self.title


def notices(run: str, history: Iterable[Mapping[str, Any]]) -> list[Notice]:
    """What of a history is worth telling."""
    happened = []
    for record in history:
        when, event = real(record.get("time")), record.get("event")
        if when is None:
            continue
        key = f"{when}:{event}:{record.get('attempt') or ''}"
        why = words(record.get("why")) or words(record.get("reason"))
        detail = clean_text(why) if why else None
        match event:
            case "exit" if record.get("state") == "failed":
                happened.append(Notice(key, run, "failure", when, f"{run} failed", detail))
            case "exit":
                happened.append(Notice(key, run, "end", when, f"{run} is {record.get('state')}", detail))
            case "restart" | "retry":
                happened.append(Notice(key, run, "retry", when, f"{run} starts again", detail))
            case "hang":
                happened.append(
                    Notice(key, run, "stall", when, f"{run} made no step for {record.get('seconds')} s", detail)
                )
    return happened


@dataclass(frozen=True)
class Receiver:
    name: str  # without anything secret in it
    send: Callable[[Notice], None]


def receivers(section: NotifySection, environment: Mapping[str, str] = os.environ) -> list[Receiver]:
    """Where notices go; UserError where a secret is not in the environment."""
    made = []
    if section.webhook:
        url = _secret(section.webhook, "notify.webhook", environment)
        host = urllib.parse.urlsplit(url).hostname or ""
        if urllib.parse.urlsplit(url).scheme not in ("http", "https") or not host:
            raise UserError(f"${section.webhook} holds no address of a webhook", fix="it begins with https://")
        made.append(Receiver(f"webhook at {host}", lambda notice: post(url, notice)))
    if section.email:
        password = (
            _secret(section.smtp_password, "notify.smtp_password", environment) if section.smtp_password else None
        )
        made.append(Receiver(f"e-mail to {', '.join(section.email)}", lambda notice: mail(section, password, notice)))
    return made


def carried(section: NotifySection, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process elsewhere needs to send the same: settings and secrets, as variables of its environment."""
    section = settings_for(section)
    if not receivers(section, environment):
        return {}
    secrets = [name for name in (section.webhook, section.smtp_password) if name]
    return {SETTINGS_VARIABLE: section.model_dump_json(), **{name: environment[name] for name in secrets}}


def _secret(variable: str, key: str, environment: Mapping[str, str]) -> str:
    value = environment.get(variable, "").strip()
    if not value:
        raise UserError(
            f"{key} names the environment variable {variable}, which is not set", fix=f"export {variable}=…"
        )
    return value


def post(url: str, notice: Notice, *, timeout_s: float = TIMEOUT_S) -> None:
    """Call a webhook; OSError, without the address, which is a secret, where it does not take it."""
    fields = [
        {"title": "run", "value": notice.run, "short": True},
        {"title": "event", "value": notice.occasion, "short": True},
    ]
    attachment = {
        "color": COLOURS[notice.occasion],
        "text": notice.detail or "",
        "fields": fields,
        "ts": int(notice.time),
    }
    body = json.dumps({"text": notice.title, "attachments": [attachment]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "windlass"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            response.read(1024)
    except urllib.error.HTTPError as error:
        raise OSError(f"it answered {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from None
    except (ValueError, EOFError) as error:  # no HTTP
        raise OSError(type(error).__name__) from None


def mail(section: NotifySection, password: str | None, notice: Notice) -> None:
    message = EmailMessage()
    message["Subject"] = notice.title
    message["From"] = section.sender
    message["To"] = ", ".join(section.email)
    message.set_content(notice.text)
    host = section.smtp_host or ""
    try:
        if section.smtp_security == "tls":
            context = ssl.create_default_context()
            server: smtplib.SMTP = smtplib.SMTP_SSL(host, section.smtp_port, timeout=TIMEOUT_S, context=context)
        else:
            server = smtplib.SMTP(host, section.smtp_port, timeout=TIMEOUT_S)
        with server:
            if section.smtp_security == "starttls":
                server.starttls(context=ssl.create_default_context())
            if section.smtp_user and password:
                server.login(section.smtp_user, password)
            server.send_message(message)
    except smtplib.SMTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from None


class Ledger:
    """What was claimed and sent. One watcher at a time holds the folder's lock (`windlass notify`)."""

    def __init__(self, folder: RunFolder, *, since: float) -> None:
        self.folder, self.path = folder, folder.path / LEDGER
        self._unwritten: list[Mapping[str, Any]] = []
        records = list(read_json_lines(self.path))
        beginnings = [begin for record in records if (begin := real(record.get("since"))) is not None]
        self.since = beginnings[0] if beginnings else since
        if not beginnings:
            self._write({"since": since})
        self.done = {(record.get("key"), record.get("to")) for record in records if record.get("state") != "claimed"}

    def has(self, notice: Notice, receiver: Receiver) -> bool:
        """Whether there is nothing to send: it was, or it happened before anybody asked to be told."""
        return notice.time < self.since or (notice.key, receiver.name) in self.done

    def send(self, notice: Notice, receiver: Receiver, *, pause_s: float = PAUSE_S) -> str | None:
        """Send; what kept it from being sent, or None. A few tries, then it is given up, and both are recorded.

        What was given up stands in the run's history too: that is where its owner looks.
        """

        def pause_after(error: Exception, failures: int) -> float | None:
            return doubling(pause_s, failures) if isinstance(error, OSError) and failures < TRIES else None

        self._note(notice, receiver, "claimed")
        problem = None
        try:
            retried(lambda: receiver.send(notice), pause_after=pause_after)
        except OSError as error:
            problem = str(error) or type(error).__name__
        self._note(notice, receiver, "failed" if problem else "sent", problem)
        if problem:
            with contextlib.suppress(OSError):  # a full disk, say
                self.folder.record("notice-failed", to=receiver.name, occasion=notice.occasion, why=clean_text(problem))
        return problem

    def send_new(
        self, candidates: Iterable[Notice], events: Sequence[str], to: Sequence[Receiver]
    ) -> tuple[list[str], list[str]]:
        """Send what was not sent yet: what was, and what was given up."""
        sent, failed = [], []
        for notice in candidates:
            for receiver in to:
                if notice.occasion not in events or self.has(notice, receiver):
                    continue
                problem = self.send(notice, receiver)
                if problem:
                    failed.append(f"{notice.title}: {receiver.name}: {problem}")
                else:
                    sent.append(f"{notice.occasion} by {receiver.name}")
        return sent, failed

    def _note(self, notice: Notice, receiver: Receiver, state: str, problem: str | None = None) -> None:
        record = {"key": notice.key, "to": receiver.name, "state": state, "occasion": notice.occasion}
        self._write({**record, **({"problem": clean_text(problem)} if problem else {})})
        if state != "claimed":
            self.done.add((notice.key, receiver.name))

    def _write(self, record: Mapping[str, Any]) -> None:
        self._unwritten.append({"time": round(time.time(), 3), **record})
        with contextlib.suppress(OSError):  # on a full disk records wait, and people are told
            while self._unwritten:
                append_json_line(self.path, self._unwritten[0])
                del self._unwritten[0]


def settings_for(section: NotifySection) -> NotifySection:
    """The section of a run file, with what it leaves open from the user's own file.

    What is left open has its default: the run file of a run folder has every key.
    """
    if SETTINGS_VARIABLE in os.environ:
        return NotifySection.model_validate_json(os.environ[SETTINGS_VARIABLE])
    path = config_file()
    if not path.is_file():
        return section
    try:
        own = yaml.safe_load(path.read_text()) or {}
        return NotifySection.model_validate({**own, **section.model_dump(exclude_defaults=True)})
    except (ValueError, yaml.YAMLError, TypeError) as error:
        first = str(error).splitlines()[0] if not isinstance(error, ValueError) else _first_problem(error)
        raise UserError(
            f"{path} cannot be used", evidence=first, fix="windlass schema --keys    has its keys"
        ) from None


def _first_problem(error: ValueError) -> str:
    problems: Sequence[Any] = error.errors() if hasattr(error, "errors") else ()
    return f"{'.'.join(map(str, problems[0]['loc']))}: {problems[0]['msg']}" if problems else str(error)


def config_file() -> Path:
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "windlass" / "notify.yaml"
