"""Measure the network between the pods of a job: names, the coordinator's port, bandwidth."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windlass.errors import UserError
from windlass.targets.kubernetes.pod_scripts import PodScripts, of_each

SECONDS = 1.0
MOST_PAIRS = 16
PATIENCE = 120.0


@dataclass(frozen=True)
class Finding:
    """One thing that was tried."""

    check: str  # name · port · bandwidth
    origin: str
    destination: str
    ok: bool
    said: str
    gbit_s: float | None = None


def names_and_port(scripts: Sequence[PodScripts], host: str, port: int) -> list[Finding]:
    """Every pod looks up the coordinator, and connects to it."""
    findings = []
    for scripts_of_pod, answer in of_each(scripts, lambda pod: _meet(pod, host, port)):
        if isinstance(answer, UserError):
            findings.append(Finding("name", scripts_of_pod.pod, host, False, _in_a_line(answer)))
            continue
        resolved, reached = answer
        addresses, tries = ", ".join(resolved.get("addresses") or ()), resolved["tries"]
        result = resolved.get("error") or f"{addresses} in {resolved['seconds'] * 1000:.0f} ms"
        result += f", asked {tries} times" if tries > 1 else ""
        findings.append(Finding("name", scripts_of_pod.pod, host, "error" not in resolved, result))
        result = reached.get("error") or f"connected in {reached['seconds'] * 1000:.1f} ms"
        findings.append(Finding("port", scripts_of_pod.pod, f"{host}:{port}", "error" not in reached, result))
    return findings


def _meet(pod: PodScripts, host: str, port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    resolved = pod.ask("resolve", host, timeout=PATIENCE)
    if not resolved.get("addresses"):
        return resolved, {"error": "there is no address to connect to"}
    return resolved, pod.ask("reach", resolved["addresses"][0], str(port))


def _in_a_line(error: UserError) -> str:
    return f"{error.what}: {error.evidence}" if error.evidence else error.what


def bandwidths(scripts: Sequence[PodScripts], addresses: Sequence[str]) -> list[Finding]:
    """From every pod to the next, around the ring that collectives go: a few seconds each, one after the other."""
    if len(scripts) < 2:
        return []
    pairs = [(index, (index + 1) % len(scripts)) for index in range(len(scripts))][:MOST_PAIRS]
    return [bandwidth(scripts[origin], scripts[receiver], addresses[receiver]) for origin, receiver in pairs]


def bandwidth(origin: PodScripts, receiver: PodScripts, address: str) -> Finding:
    listener = _Listener(receiver)
    listener.start()
    try:
        sent = origin.ask("send", address, str(listener.answer()["port"]), str(SECONDS))
        if "error" in sent:
            return Finding("bandwidth", origin.pod, receiver.pod, False, str(sent["error"]))
        received = listener.answer()
    except UserError as error:
        return Finding("bandwidth", origin.pod, receiver.pod, False, _in_a_line(error))
    if "error" in received or not received.get("seconds"):
        return Finding("bandwidth", origin.pod, receiver.pod, False, str(received.get("error") or "nothing came"))
    speed = received["bytes"] * 8 / received["seconds"] / 1e9
    return Finding("bandwidth", origin.pod, receiver.pod, True, f"{speed:.2f} Gbit/s", round(speed, 3))


class _Listener(threading.Thread):
    """The receiving end, which says its port first and what it got at last."""

    def __init__(self, scripts: PodScripts) -> None:
        super().__init__(daemon=True)
        self.scripts = scripts
        self.answers: queue.Queue[dict[str, Any] | UserError] = queue.Queue()
        self._rest = b""

    def run(self) -> None:
        try:
            self.scripts.stream("serve", str(SECONDS), to=self._take, timeout=PATIENCE)
        except UserError as error:
            self.answers.put(error)

    def answer(self) -> dict[str, Any]:
        try:
            answer = self.answers.get(timeout=PATIENCE)
        except queue.Empty:
            raise UserError(f"{self.scripts.pod} did not answer within {PATIENCE:.0f} s") from None
        if isinstance(answer, UserError):
            raise answer
        return answer

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.answers.put(json.loads(line))
