"""What a pod runs: `python -m windlass.targets.kubernetes.entry`. It joins the other pods and runs torchrun with them.

SIGTERM: the ranks save and this pod leaves. SIGHUP: the ranks of all pods save and start anew, with the code that is
there then. SIGUSR1: the ranks are killed and this pod leaves.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType

from windlass.errors import ExitCode, UserError
from windlass.targets.kubernetes.pod.attempt_history import AttemptHistory
from windlass.targets.kubernetes.pod.coordinator import (
    BEAT_SECONDS,
    LEAVE_SECONDS,
    SETTLE_SECONDS,
    SILENCE_SECONDS,
    Coordinator,
)
from windlass.targets.kubernetes.pod.interface import LAUNCHER_VARIABLE
from windlass.targets.kubernetes.pod.launching import Launch, end_of, launch
from windlass.targets.kubernetes.pod.log_forwarder import LogForwarder, PodOutput, Records
from windlass.targets.kubernetes.pod.messages import Host, Line, LostError, Message, addresses_of, knock
from windlass.targets.kubernetes.pod.place import Place, code_digest
from windlass.targets.kubernetes.pod.verdict import LEFT
from windlass.targets.launch import processes

TICK_SECONDS = 0.2
LOOK_SECONDS = 10.0  # between two looks at who answers for node 0
GOODBYE_SECONDS = 5.0
BROKEN = 134  # as if aborted: above 128 every job kind makes a new pod, and this one counts as a failure
ELASTIC_VARIABLE = "WINDLASS_ELASTIC_SECONDS"


class Entry:
    """This pod."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.born = time.time()
        self.output = PodOutput()
        self.forwarder: LogForwarder | None = None
        self.coordinator: Coordinator | None = None
        self.coordinating: threading.Thread | None = None
        self.launch: Launch | None = None
        self.stop_at: float | None = None  # when this pod got a SIGTERM
        self.stop_now = False
        self.leave_sent = False  # to the coordinator
        self.renew = False  # SIGHUP
        self.host_born = 0.0

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGUSR1, self._on_now)
        signal.signal(signal.SIGHUP, self._on_renew)
        signal.signal(signal.SIGINT, self._on_term)
        processes.adopt_orphans()  # PID 1 of a container inherits them anyway
        self.place.scratch.mkdir(parents=True, exist_ok=True)
        history = AttemptHistory(self.place.folder, self.place.run)
        if self.place.is_host:
            history.open()
        else:
            self.place.folder.logs.mkdir(parents=True, exist_ok=True)
        before = history.ended_before(self.place.submission)
        emits = self.place.is_host or not self.place.shared
        self.forwarder = LogForwarder(self.output, Records(self.place.folder) if emits else None)
        try:
            if before is not None:
                self.log(f"this job is over already: {before.state}" + (f": {before.reason}" if before.reason else ""))
                return pod_code(int(before.code))
            if self.place.is_host:
                self._start_coordinator(history)
            return self._train_until_ended()
        finally:
            self._kill()
            self.forwarder.close()
            if self.coordinator and self.coordinating and self.coordinator.over.is_set() and not self._is_stopping:
                self.coordinating.join(LEAVE_SECONDS + SETTLE_SECONDS)

    def log(self, text: str) -> None:
        self.output.write(f"windlass: {text}")

    # -- finding the coordinator

    def _start_coordinator(self, history: AttemptHistory) -> None:
        family = socket.AF_INET6 if ":" in self.place.address else socket.AF_INET
        listener = socket.create_server(("", self.place.port), family=family, backlog=1024)
        self.coordinator = Coordinator(
            listener,
            history,
            nodes=self.place.nodes,
            min_nodes=self.place.min_nodes,
            submission=self.place.submission,
            token=self.place.token,
            address=self.place.address,
            born=self.born,
            log=self.log,
            code=lambda: code_digest(self.place.carried),
            quiet_seconds=float(os.environ.get(ELASTIC_VARIABLE) or 60.0),
        )
        self.coordinating = threading.Thread(target=self._run_coordinator, name="coordinator", daemon=True)
        self.coordinating.start()

    def _run_coordinator(self) -> None:
        assert self.coordinator is not None
        try:
            self.coordinator.run()
            self.coordinator.see_off()
        except BaseException as error:  # without it no pod goes on: log why and leave, so that a new pod takes over
            self.log(f"the coordinator failed: {type(error).__name__}: {error}")
            self.stop_now = True

    def _train_until_ended(self) -> int:
        """Join the coordinator and train, again and again until it sends the exit code."""
        waiting_since, reminded = time.monotonic(), time.monotonic()
        while True:
            if self._is_stopping:
                return LEFT
            line = self._find_host()
            if line is None:
                if time.monotonic() - reminded > 30:
                    reminded = time.monotonic()
                    self.log(f"waiting for node 0 at {self.place.host} for {reminded - waiting_since:.0f} s")
                time.sleep(TICK_SECONDS)
                continue
            stop_beating = threading.Event()
            threading.Thread(target=_beat, args=(line, stop_beating), name="beat", daemon=True).start()
            try:
                code = self._follow(line)
            except LostError as error:
                self.log(f"node 0 is lost: {error}")
                code = None
            finally:
                stop_beating.set()
                self._kill()
                line.close()
            if code is not None:
                return code
            waiting_since = reminded = time.monotonic()

    def _find_host(self) -> Line | None:
        """A line to the youngest pod that answers for node 0, after saying hello to it."""
        hosts = self._answering()
        if not hosts:
            return None
        hosts.sort(key=lambda host: host.born)
        for host in hosts[:-1]:
            host.line.close()
        host, place = hosts[-1], self.place
        self.host_born = host.born
        try:
            host.send_hello(place.token, node=place.node, pod=place.pod, born=self.born, submission=place.submission)
        except LostError:
            host.line.close()
            return None
        return host.line

    def _answering(self, *, other_than: str | None = None) -> list[Host]:
        """Those who answer for node 0."""
        answers = []
        own = [self.place.address] if self.place.is_host else []
        for address in dict.fromkeys([*own, *addresses_of(self.place.host, self.place.port)]):
            if address == other_than:
                continue
            try:
                line = Line.to((address, self.place.port), timeout=3.0)
            except LostError:
                continue
            try:
                answers.append(knock(line, self.place.token, 3.0))
            except LostError:
                line.close()
        return answers

    def _is_superseded(self, here: str) -> bool:
        """Whether a younger pod answers for node 0: this host's kubelet may be gone, and its pod replaced."""
        hosts = self._answering(other_than=here)
        for host in hosts:
            host.line.close()
        return any(host.born > self.host_born for host in hosts)

    # -- training

    def _follow(self, line: Line) -> int | None:
        """Do as the coordinator says; the exit code of this pod, or None to look for the coordinator anew."""
        received_at = looked = time.monotonic()
        reported_at: float | None = None
        while True:
            for message in line.receive(TICK_SECONDS):
                received_at = time.monotonic()
                if message["word"] == "start":
                    reported_at = None
                code = self._carry_out(message)
                if code is not None:
                    return code
            if self.launch is None:
                processes.reap()  # orphans; torchrun's own end must reach its Popen
            now = time.monotonic()
            if now - received_at > SILENCE_SECONDS:
                raise LostError(f"silent for {SILENCE_SECONDS:.0f} s")
            if now - looked > LOOK_SECONDS:
                looked = now
                if self.place.is_host and self.launch and code_digest(self.place.carried) != self.launch.code:
                    line.send(word="restart", why="there is new code")
                saving = self._is_stopping or (self.launch is not None and self.launch.save_requested)
                if not saving and self._is_superseded(line.peer):
                    if self.place.is_host:
                        self.log("this pod was replaced as node 0")
                        return LEFT
                    raise LostError("it was replaced by a younger pod")
            self._leave_if_stopping(line)
            if self.launch is None:
                if self._is_stopping and (reported_at is None or now - reported_at > GOODBYE_SECONDS):
                    return LEFT
            elif self.launch.tend(now):
                self._report(line)
                reported_at = now
            if self.renew:
                self.renew = False
                line.send(word="restart", why="told to start the ranks anew")

    def _carry_out(self, message: Message) -> int | None:
        match message["word"]:
            case "start":
                self.launch = launch(self.place, message, self.output)
                assert self.forwarder is not None
                self.forwarder.follow(self.launch.logs, self.launch.log, first_rank=self.launch.ranks.start)
            case "save" if self.launch:
                self.launch.request_save()
            case "over" if self.launch:
                self.launch.end_soon()
            case "exit":
                self._kill()
                code = pod_code(int(message["code"]))
                return LEFT if self._is_stopping and code else code
            case "replaced":
                self.log("this pod was replaced by a younger one")
                return LEFT
        return None

    def _report(self, line: Line) -> None:
        """Report how the ranks of this pod ended."""
        assert self.launch is not None
        assert self.forwarder is not None
        ended, self.launch = self.launch, None
        self.forwarder.flush()
        end = end_of(self.place, ended, leaving=self._is_stopping)
        for error in end.errors:
            self.output.record("error", error)
        line.send(word="end", attempt=ended.attempt, end=end.as_dict())

    def _leave_if_stopping(self, line: Line) -> None:
        if not self._is_stopping or self.launch is None:
            return
        if not self.leave_sent:
            self.leave_sent = True
            line.send(word="leaving")
        if self.stop_now:
            self.launch.kill()
        else:
            assert self.stop_at is not None
            self.launch.request_save()
            if time.monotonic() > self.stop_at + self.place.run.checkpoint.grace_seconds:
                self.launch.kill()

    def _kill(self) -> None:
        if self.launch is not None:
            self.launch.kill()
            self.launch = None

    @property
    def _is_stopping(self) -> bool:
        return self.stop_at is not None or self.stop_now

    def _on_term(self, _signal: int, _frame: FrameType | None) -> None:
        self.stop_at = self.stop_at or time.monotonic()

    def _on_now(self, _signal: int, _frame: FrameType | None) -> None:
        self.stop_now = True

    def _on_renew(self, _signal: int, _frame: FrameType | None) -> None:
        self.renew = True


def pod_code(code: int) -> int:
    """The container's exit code: below 128 an end for good, whatever the job kind."""
    if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
        return LEFT
    return code


def _beat(line: Line, stop: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS):
        try:
            line.send(word="beat")
        except LostError:
            return


def main() -> int:
    try:
        if os.environ.get(LAUNCHER_VARIABLE) == "hyperpodrun":
            from windlass.targets.kubernetes.pod.hyperpod_agent import run_agent

            return run_agent()
        return int(Entry(Place.of(os.environ)).run())
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        PodOutput().record("error", {**error.as_dict(), "rank": None, "retry": False})
        return int(error.exit_code)
    except Exception:  # a file system that is away, a name that does not resolve: worth another pod, if not for ever
        traceback.print_exc()
        return BROKEN


if __name__ == "__main__":
    sys.exit(main())
