"""Watch over the other ranks: one that dies or stops answering is named by all others, which then leave.

NCCL notices a lost peer on the same node by its timeout only: data goes through shared memory there, and the waiting
kernel spins on the device. So every rank keeps a TCP connection to rank 0, served by a thread: the kernel closes it
when a process dies, whatever that process was doing, and a process that is stopped sends nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from windlass.data.shards.folder import allow_open_files
from windlass.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)

BEAT_S = 1.0  # between two messages of a rank
# A rank that sends nothing for so long is lost, and named after a quarter of it; less than timeout_minutes.
SILENT_S = 120.0
GRACE_S = 5.0  # for a rank's own main thread to leave with an error of its own, which usually says more
CONNECT_S = 10.0
NAMED_S = 3.0  # for rank 0 to say who was lost
ABORT_S = 5.0
SEND_S = 5.0
LONGEST_MESSAGE = 1 << 16
HELLO_S = 15.0  # for a connection to say which rank it is
MOST_STRANGERS = 64  # connections, beside one per rank, that have not said so; the oldest makes room


@dataclass(frozen=True)
class Lost:
    rank: int
    host: str
    why: str
    detail: str | None = None  # the collective that the others wait in

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.why}" + (f"; {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Standing:
    """Where a rank is."""

    rank: int
    host: str
    pid: int | None
    silent_s: float
    state: dict[str, Any]  # point, step, number of collectives by group
    times: dict[str, Any]


@dataclass
class Peer:
    """One connection: what came over it, and when."""

    socket: socket.socket
    rank: int | None = None
    host: str = "?"
    came: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    state: dict[str, Any] = field(default_factory=dict)
    times: dict[str, Any] = field(default_factory=dict)  # of its steps, as it last sent them
    pid: int | None = None
    buffer: bytes = b""
    left: bool = False
    named: str | None = None  # what its silence is in the log with
    sending: threading.Lock = field(default_factory=threading.Lock)

    def messages(self) -> Iterator[dict[str, Any]]:
        """What has come; OSError or EOFError when the connection is gone."""
        chunk = self.socket.recv(LONGEST_MESSAGE)
        if not chunk:
            raise EOFError
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        if len(self.buffer) > LONGEST_MESSAGE:
            raise EOFError
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # anybody can connect, and nest brackets without an end
                raise EOFError from None
            if isinstance(message, dict):
                yield message

    def send(self, **message: Any) -> None:
        with self.sending, contextlib.suppress(OSError):  # its end is noticed by the reader
            self.socket.sendall(json.dumps(message).encode() + b"\n")


class PeerWatch:
    """The watch of one rank. Before `begin`, and in a world of one, it does nothing."""

    def __init__(self) -> None:
        self.lost: Lost | None = None
        self._known = threading.Event()  # a rank was lost
        self._leaving = threading.Event()  # this rank's main thread leaves by itself
        self._closed = threading.Event()  # and the others know it
        self._peers: list[Peer] = []
        self._strangers: list[Peer] = []  # connected, the oldest first, and not known as ranks
        self._thread: threading.Thread | None = None
        self.clock_ahead = float("-inf")  # of rank 0's clock before this one's, less the way of a message
        self.times: dict[str, Any] = {}  # of this rank's steps
        self._unsent_times: dict[str, Any] | None = None
        self.measure_at = 0  # the step after which every rank measures; rank 0 chooses it
        self.on_stacks: Callable[[dict[int, int]], None] = lambda _: None  # with silent neighbours: rank to pid

    def begin(
        self,
        ranks: Ranks,
        *,
        limit_s: float,
        where: Callable[[], tuple[str, int]],
        on_lost: Callable[[Lost], None],
    ) -> None:
        """Connect all ranks; `on_lost` is called in a thread when this rank has to leave, and must end the process."""
        self.ranks, self.where, self.on_lost = ranks, where, on_lost
        if ranks.world_size == 1:
            return
        self.silent_s = min(SILENT_S, 0.8 * limit_s)  # before the collective itself gives up, which says less
        if ranks.is_first:
            allow_open_files(ranks.world_size + MOST_STRANGERS)
        listening = _listen(ranks.world_size) if ranks.is_first else None
        hosts = [os.environ["MASTER_ADDR"], socket.gethostname()]
        offer = (hosts, listening.getsockname()[1], secrets.token_hex(16)) if listening else None
        hosts, port, self.secret = ranks.broadcast(offer)
        problem = self._connect(hosts, port) if listening is None else None
        self._thread = threading.Thread(target=self._serve, args=(listening,), name="peers", daemon=True)
        self._thread.start()
        problems = [f"rank {rank}: {why}" for rank, why in enumerate(ranks.gather(problem)) if why]
        if problems and ranks.is_first:
            log.warning("a rank that is lost will be noticed by timeouts only: %s", problems[0])

    def share_times(self, times: dict[str, Any]) -> None:
        """Send the times of this rank's steps to rank 0, with the next message."""
        self.times = self._unsent_times = times

    def standings(self) -> list[Standing]:
        """Where every rank is, as far as this one knows: on rank 0 all of them."""
        mine = Standing(self.ranks.rank, socket.gethostname(), os.getpid(), 0.0, self._state(), self.times)
        now = time.monotonic()
        others = [
            Standing(peer.rank, peer.host, peer.pid, now - peer.heard, peer.state, peer.times)
            for peer in list(self._peers)
            if peer.rank is not None and not peer.left
        ]
        return sorted([mine, *others], key=lambda standing: standing.rank)

    def ask_for_stacks(self, silent: Sequence[Standing]) -> None:
        """Have every rank write its stacks, and one rank of each node those of its neighbours that do not answer."""
        asked_hosts: set[str] = set()
        for standing in self.standings():
            first_here = standing not in silent and standing.host not in asked_hosts
            mates = [mate for mate in silent if first_here and mate.host == standing.host]
            neighbours = {mate.rank: mate.pid for mate in mates if mate.pid}
            asked_hosts |= {standing.host} if first_here else set()
            if standing.rank == self.ranks.rank:
                self.on_stacks(neighbours)
            for peer in self._peers:
                if peer.rank == standing.rank:
                    peer.send(stacks=neighbours)

    def lose(self, rank: int, host: str, why: str) -> None:
        """Give a rank up: it is named by all, and all leave."""
        lost = Lost(rank, host, why)
        if self._thread is None:
            self.on_lost(lost)
            return
        for peer in list(self._peers):
            peer.send(lost=asdict(lost))
        self.lost = self.lost or lost

    def close(self, failure: str | None = None) -> None:
        """This rank leaves: done, or with an error that the others are told."""
        self._leaving.set()
        for peer in list(self._peers):
            peer.send(bye=failure)
        self._closed.set()

    def who(self) -> Lost | None:
        """Which rank was lost, if one was; asked by a rank that leaves because it saw a connection break."""
        self._leaving.set()
        if self._thread is not None:
            self._known.wait(NAMED_S)
        return self.lost

    def _connect(self, hosts: list[str], port: int) -> str | None:
        """Reach rank 0 by one of its names; what went wrong with the last."""
        problem = None
        for host in hosts:
            try:
                connection = socket.create_connection((host, port), timeout=CONNECT_S)
            except OSError as error:
                problem = f"{host}:{port}: {error}"
                continue
            _set_up(connection)
            peer = Peer(connection, rank=0, host=hosts[-1])  # its own name, whichever address reached it
            peer.send(hello=self.ranks.rank, host=socket.gethostname(), pid=os.getpid(), secret=self.secret)
            self._peers.append(peer)
            return None
        return problem

    def _serve(self, listening: socket.socket | None) -> None:
        selector = selectors.DefaultSelector()
        if listening is not None:
            selector.register(listening, selectors.EVENT_READ)
        for peer in self._peers:
            selector.register(peer.socket, selectors.EVENT_READ, peer)
        beat = last_turn = time.monotonic()
        while self.lost is None and not self._closed.is_set():
            for key, _ in selector.select(BEAT_S):
                if key.data is None:
                    self._accept(key.fileobj, selector)
                else:
                    self._read(key.data, selector)
            now = time.monotonic()
            if now - last_turn > self.silent_s / 2:  # it was this rank that stood still: a suspended job, a paused VM
                for peer in self._peers:
                    peer.heard = now
            last_turn = now
            if now >= beat:
                beat = now + BEAT_S
                message = {"beat": self._state(), "host": socket.gethostname(), "time": time.time()}
                message |= {"measure_at": self.measure_at} if self.ranks.is_first else {}
                times, self._unsent_times = self._unsent_times, None
                for peer in self._peers:
                    if peer.rank is not None and not peer.left:
                        peer.send(**message, **({"times": times} if times and not self.ranks.is_first else {}))
            self._look_for_silence(now)
            for stranger in [peer for peer in self._strangers if now - peer.came > HELLO_S]:
                self._drop(stranger, selector)
        if self.lost is not None:
            self._leave()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]

    def _accept(self, listening: Any, selector: selectors.BaseSelector) -> None:
        if len(self._strangers) >= MOST_STRANGERS + self.ranks.world_size:  # each holds a file handle of the training
            self._drop(self._strangers[0], selector)
        try:
            connection, _ = listening.accept()
            _set_up(connection)
        except OSError:  # it is gone again, or there is no file handle left: who waits would be reported at once again
            time.sleep(BEAT_S / 10)
            return
        stranger = Peer(connection)
        self._strangers.append(stranger)
        selector.register(connection, selectors.EVENT_READ, stranger)

    def _drop(self, peer: Peer, selector: selectors.BaseSelector) -> None:
        if peer in self._strangers:
            self._strangers.remove(peer)
        selector.unregister(peer.socket)
        peer.socket.close()

    def _read(self, peer: Peer, selector: selectors.BaseSelector) -> None:
        if peer.socket.fileno() < 0:  # it made room for another in the same turn
            return
        try:
            for message in peer.messages():
                self._receive(peer, message)
        except (EOFError, OSError) as error:
            self._drop(peer, selector)
            if peer in self._peers:
                self._peers.remove(peer)
                if not peer.left:
                    how = "" if isinstance(error, EOFError) else f" ({error})"
                    self._lose(peer, f"ended without a word{how}: killed, or its node is gone")

    def _receive(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.rank is None:  # whoever else finds this port has no say
            rank = message.get("hello")
            if message.get("secret") != self.secret or not isinstance(rank, int):
                raise EOFError
            peer.rank, peer.host = rank, str(message.get("host"))
            peer.pid = message["pid"] if isinstance(message.get("pid"), int) else None
            self._strangers.remove(peer)
            self._peers.append(peer)
        peer.heard = time.monotonic()
        peer.named = None
        if "beat" in message:
            peer.host = str(message.get("host"))
            peer.state = message["beat"] if isinstance(message["beat"], dict) else {}
            peer.times = message["times"] if isinstance(message.get("times"), dict) else peer.times
            if peer.rank == 0 and isinstance(message.get("measure_at"), int):
                self.measure_at = message["measure_at"]
            if isinstance(message.get("time"), float):
                self.clock_ahead = max(self.clock_ahead, message["time"] - time.time())
        if "stacks" in message:
            neighbours = message["stacks"] if isinstance(message["stacks"], dict) else {}
            self.on_stacks({int(rank): int(pid) for rank, pid in neighbours.items()})
        if "bye" in message:
            peer.left = True
            if message["bye"]:
                self._lose(peer, f"failed: {message['bye']}")
        if "lost" in message and self.lost is None:
            lost = message["lost"]
            self.lost = Lost(int(lost["rank"]), str(lost["host"]), str(lost["why"]), lost.get("detail"))

    def _look_for_silence(self, now: float) -> None:
        for peer in list(self._peers):
            silent = now - peer.heard
            if peer.left or peer.rank is None or silent < self.silent_s / 4:
                continue
            if peer.named is None:
                peer.named = self._missed(peer) or ""
                log.warning(
                    "rank %d on %s has sent nothing for %.0f s: stopped, or cut off; %s",
                    *(peer.rank, peer.host, silent, peer.named or "no collective waits for it"),
                )
            if silent > self.silent_s:
                self._lose(peer, f"has sent nothing for {silent:.0f} s: stopped, or cut off", self._missed(peer))

    def _lose(self, peer: Peer, why: str, detail: str | None = None) -> None:
        if self.lost is not None or peer.rank is None:
            return
        self.lost = Lost(peer.rank, peer.host, why, detail or self._missed(peer))
        for other in self._peers:
            if other is not peer and not other.left:
                other.send(lost=asdict(self.lost))

    def _leave(self) -> None:
        """Let the main thread leave by itself if it can: it may be in a collective that never ends."""
        assert self.lost is not None
        self._known.set()
        if not self._leaving.wait(GRACE_S):
            self.on_lost(self.lost)

    def _state(self) -> dict[str, Any]:
        point, step = self.where()
        return {"point": point, "step": step, "collectives": enqueued_collectives()}

    def _missed(self, peer: Peer) -> str | None:
        """The collective that this rank has begun and the other has not, and where the other was last seen."""
        theirs = peer.state.get("collectives") or {}
        missed = [
            collective
            for collective in pending_collectives()
            if collective.number > int(theirs.get(collective.group, 0))
        ]
        step = peer.state.get("step")
        seen = f"last seen at {peer.state.get('point')} of step {step}" if step else None
        parts = [f"it missed {missed[0]}" if missed else None, seen]
        return ", ".join(part for part in parts if part) or None


def _listen(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _set_up(connection: socket.socket) -> None:
    """No message waits for the acknowledgement of another: a rank that ends right after its farewell, with something
    unread, takes along whatever its kernel has not sent, and would be taken for a lost one.
    """
    connection.settimeout(SEND_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@dataclass(frozen=True)
class Collective:
    group: str  # backend and number of the group
    number: int
    operation: str
    sizes: str
    purpose: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.sizes}, number {self.number} of group {self.group}{self.purpose}"


def _dumps(**options: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What torch's flight recorders hold: NCCL's, and since 2.12 gloo's."""
    import torch._C._distributed_c10d as native

    for backend, name in (("nccl", "_dump_nccl_trace_json"), ("gloo", "_dump_fr_trace_json")):
        dump = getattr(native, name, None)
        if dump is None or (backend == "nccl" and not dist.is_nccl_available()):
            continue
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            yield backend, json.loads(dump(**options))


def enqueued_collectives() -> dict[str, int]:
    """The number of the newest collective of every group, as the flight recorders have it."""
    numbers: dict[str, int] = {}
    for backend, trace in _dumps(includeCollectives=False):
        for group, status in (trace.get("pg_status") or {}).items():
            numbers[f"{backend}:{group}"] = int(status.get("last_enqueued_collective") or 0)
    return numbers


def recent_collectives(count: int, *, leave_out: str) -> tuple[int, dict[str, float]]:
    """How many collectives this rank has begun, and when it came to the newest; those of one group are left out."""
    total, came = 0, []
    for backend, trace in _dumps(includeCollectives=True, onlyActive=False):
        for entry in trace.get("entries") or []:
            if (entry.get("process_group") or [""])[0] == leave_out or entry.get("is_p2p"):
                continue
            key = f"{backend}:{entry.get('pg_id')}:{entry.get('collective_seq_id')}"
            came.append((int(entry.get("time_created_ns") or 0), key))
            total = max(total, 1 + int(entry.get("record_id") or 0))
    return total, {key: nanoseconds / 1e9 for nanoseconds, key in sorted(came)[-count:]}


def pending_collectives() -> list[Collective]:
    """The oldest collective of each group that this rank has begun and not ended; the newest of those first."""
    oldest: dict[str, tuple[int, Collective]] = {}
    for backend, trace in _dumps(includeCollectives=True, onlyActive=False):
        status = trace.get("pg_status") or {}
        for entry in trace.get("entries") or []:
            if entry.get("retired") or entry.get("state") == "completed" or entry.get("is_p2p"):
                continue
            name, purpose = [*(entry.get("process_group") or ()), "", ""][:2]
            number, group = int(entry.get("collective_seq_id") or 0), str(entry.get("pg_id", name))
            if number <= int((status.get(group) or {}).get("last_completed_collective") or 0):
                continue
            collective = Collective(
                group=f"{backend}:{group}",
                number=number,
                operation=str(entry.get("profiling_name")),
                sizes=" ".join(str(size) for size in (entry.get("input_sizes") or [])[:3]),
                purpose="" if purpose in ("", "undefined") else f" ({purpose})",
            )
            if collective.group not in oldest or number < oldest[collective.group][1].number:
                oldest[collective.group] = (int(entry.get("time_created_ns") or 0), collective)
    return [part for _, part in sorted(oldest.values(), key=lambda pair: -pair[0])]


def abort_device_groups() -> None:
    """End kernels that wait for a lost peer, so that the process can leave the GPU. Bounded: it may hang itself."""

    def abort() -> None:
        import torch

        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError, AttributeError):
                backend: Any = group._get_backend(torch.device("cuda"))
                if backend.name() == "nccl":
                    backend.abort()

    thread = threading.Thread(target=abort, name="abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
