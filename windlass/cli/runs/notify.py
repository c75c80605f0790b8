"""`windlass notify`: tell people when a run ends, fails, starts again or hangs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import click

from windlass.api.lookup import find, load_run
from windlass.cli.jobs import json_option, on_option, quiet_option, run_names
from windlass.cli.output import print_json, warn
from windlass.common.locks import locked
from windlass.errors import ExitCode, UserError
from windlass.targets.launch.ending import unrecorded_end
from windlass.targets.launch.notifications import LEDGER, Ledger, Notice, Receiver, notices, receivers, settings_for
from windlass.targets.launch.tail import Tail
from windlass.targets.protocol import JobRef, KeepsRunFolder, Target

POLL_SECONDS = 1.0


@click.command(short_help="Tell people when a run ends, fails or hangs.")
@click.argument("name", shell_complete=run_names)
@click.option("--test", "is_test", is_flag=True, help="Send one message now, to see that it arrives.")
@click.option("--since", type=float, hidden=True, help="Seconds since 1970: earlier events are not told.")
@on_option
@quiet_option
@json_option
def notify(name: str, is_test: bool, since: float | None, place: str | None, quiet: bool, as_json: bool) -> int:
    """Tell people when a run ends, fails or hangs.

    Watches a run until it has ended and sends what the section notify of its run file asks for: a webhook (Slack's
    form), e-mail. `windlass run` starts this by itself. Every event is sent once, also if this is started again. What
    could not be sent is in the run's history, which `windlass show` prints; the exit code is 1 then.
    """
    target, job = find(name, place)
    section = settings_for(load_run(job.folder).notify)
    to = receivers(section)
    if not to:
        raise UserError(
            f"nobody is to be told of {job.name}: notify.webhook and notify.email are empty",
            fix="notify: {webhook: SLACK_WEBHOOK_URL} in the run file, or in ~/.config/windlass/notify.yaml",
        )
    failed: list[str] = []
    state: str | None = None
    if is_test:
        notice = Notice("test", job.name, "end", time.time(), f"a test of `windlass notify {job.name}`")
        problems = [f"{receiver.name}: {problem}" for receiver in to if (problem := _try(receiver, notice))]
        if problems:
            raise UserError(
                "the test did not arrive",
                evidence="\n".join(problems),
                fix="notify.*: docs/run-file.md#notify has its keys",
                exit_code=ExitCode.FAILED,
            )
        sent = [receiver.name for receiver in to]
    else:
        with locked(job.folder.path / f".{LEDGER}.lock", patience_s=0) as is_mine:
            if not is_mine:
                raise UserError(
                    f"another `windlass notify {job.name}` is watching it already",
                    fix=f"windlass notify {job.name} --test    tries it beside that one",
                )
            ledger = Ledger(job.folder, since=time.time() if since is None else since)
            sent, failed, state = _watch(target, job, section.events, to, ledger)
    for problem in failed:
        warn(problem)
    if as_json:
        print_json({"name": job.name, "state": state, "sent": sent, "failed": failed})
    elif not quiet:
        click.echo(f"sent: {', '.join(sent) if sent else 'nothing'}")
    return ExitCode.FAILED if failed else ExitCode.OK


def _try(receiver: Receiver, notice: Notice) -> str | None:
    try:
        receiver.send(notice)
    except OSError as error:
        return str(error) or type(error).__name__
    return None


def _watch(
    target: Target[Any], job: JobRef, events: Sequence[str], to: Sequence[Receiver], ledger: Ledger
) -> tuple[list[str], list[str], str]:
    """Send until the run has ended."""
    sent: list[str] = []
    failed: list[str] = []
    history = Tail(job.folder.history)
    with target.following(job) if isinstance(target, KeepsRunFolder) else nullcontext():
        while True:
            status = target.status(job)  # before the reading: nothing recorded before the end is missed
            end = unrecorded_end(job.folder, status)  # before the reading too: the next start may write it down
            records = [*history.records(), *([end] if end else [])]
            new, given_up = ledger.send_new(notices(job.name, records), events, to)
            sent += new
            failed += given_up
            if status.ended:
                return sent, failed, status.state
            time.sleep(POLL_SECONDS)
