"""Run inside each pod of a deep check: tries what training needs, and prints what it found as JSON lines.

Carried as the text of a command, so it needs the standard library alone; collectives need the image's torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MARK = "WINDLASS-DEEP "
PORT = 29650  # the ring; collectives meet at the next one
SECONDS = 2.0
PATIENCE = 120.0
START_SECONDS = 1500.0  # for another pod to start: its node is made first, and pulls an image of many gigabytes
SILENT_TRIES = 4  # of five seconds each, to a pod that does not even refuse
LATE_SECONDS = 30.0  # for a pod that is there to send what it has to send
CHUNK = 1 << 20
SIZES = (1 << 20, 1 << 24, 1 << 26)  # bytes of an all-reduce
ROUNDS = 5
LONGEST = 5.0  # seconds of an all-reduce: over a slow network larger ones are left out


def report(check: str, **facts: object) -> None:
    line = {"check": check, "pod": index(), "host": os.environ.get("WINDLASS_NODE", ""), **facts}
    print(MARK + json.dumps(line), flush=True)


def index() -> int:
    return int(os.environ["JOB_COMPLETION_INDEX"])


def name_of(pod: int) -> str:
    return os.environ["WINDLASS_DEEP_HOSTS"].replace("{}", str(pod))


def resolve(name: str) -> str | None:
    """The address of a pod. Its name appears with the address: a pod whose name is unknown may have no node yet."""
    begin, tries, reported = time.monotonic(), 0, False
    while True:
        tries += 1
        try:
            address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
            report("dns", name=name, address=address, seconds=round(time.monotonic() - begin, 3), tries=tries)
            return str(address)
        except OSError as error:
            waited = time.monotonic() - begin
            if waited > PATIENCE and not reported:  # a later answer corrects it
                report("dns", name=name, error=str(error))
                reported = True
            unknown = isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME
            if waited > (START_SECONDS if unknown else PATIENCE):
                return None
            time.sleep(1.0)


class Receiver(threading.Thread):
    """Takes what the pod before this one sends, and measures it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        if socket.has_dualstack_ipv6():
            self.server = socket.create_server(("", PORT), family=socket.AF_INET6, dualstack_ipv6=True)
        else:  # a kernel without IPv6
            self.server = socket.create_server(("", PORT))

    def run(self) -> None:
        try:
            while not (received := self._receive()):
                pass  # somebody who asks whether this pod is there
            report("link", origin=before(), gbit_s=received)
        except OSError as error:
            report("link", origin=before(), error=f"nothing came: {error}")

    def _receive(self) -> float | None:
        connection, _ = self.server.accept()
        connection.settimeout(SECONDS * 10)
        received, begin = 0, time.monotonic()
        while chunk := connection.recv(CHUNK):
            received += len(chunk)
        return round(received * 8 / max(time.monotonic() - begin, 1e-6) / 1e9, 4) if received else None

    def wait(self) -> None:
        """Until the pod before this one has sent, or is there and has not: without waiting for what cannot come."""
        self.join(SECONDS)
        address = resolve(name_of(before())) if self.is_alive() else None
        problem = f"no connection within {LATE_SECONDS:.0f} s from a pod that is there"
        if address:
            try:
                connect(address).close()
                self.join(LATE_SECONDS)
            except OSError as error:
                problem = str(error)
        if self.is_alive():
            report("link", origin=before(), error=f"nothing came: {problem}")


def before() -> int:
    return (index() - 1) % int(os.environ["WINDLASS_DEEP_PODS"])


def connect(address: str) -> socket.socket:
    """To the ring's port of a pod. One whose container has not started refuses; silence is a network that drops."""
    begin, silent = time.monotonic(), 0
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=5.0)
        except OSError as error:
            silent += isinstance(error, TimeoutError)
            patience = START_SECONDS if isinstance(error, ConnectionRefusedError) else PATIENCE
            if silent >= SILENT_TRIES or time.monotonic() - begin > patience:
                raise
            time.sleep(1.0)


def wait_for_all(num_pods: int) -> None:
    """Until every pod has started: collectives are given up after PATIENCE, and a pod may still pull its image."""
    for pod in range(num_pods):
        address = resolve(name_of(pod)) if pod != index() else None
        with contextlib.suppress(OSError):  # its neighbours in the ring report it
            if address:
                connect(address).close()


def send(address: str) -> None:
    """To the next pod of the ring, for some seconds."""
    to = (index() + 1) % int(os.environ["WINDLASS_DEEP_PODS"])
    try:
        connection = connect(address)
    except OSError as error:
        report("port", to=to, port=PORT, error=str(error))
        return
    with connection:
        connection.settimeout(SECONDS * 10)
        until, chunk = time.monotonic() + SECONDS, bytes(CHUNK)
        try:
            while time.monotonic() < until:
                connection.sendall(chunk)
        except OSError as error:  # small packets pass and large ones do not: the MTU of a network in between
            report("port", to=to, port=PORT, error=f"connected, but data does not get through: {error}")


def disk(folder: str) -> None:
    """A file written through to the volume, and read again."""
    size = 256
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".windlass-deep-") as file:
            block, begin = os.urandom(CHUNK), time.monotonic()
            for _ in range(size):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            wrote = size / (time.monotonic() - begin)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.monotonic()
            while file.read(CHUNK):
                pass
            report("disk", folder=folder, write_mib_s=round(wrote), read_mib_s=round(size / (time.monotonic() - begin)))
    except OSError as error:
        report("disk", folder=folder, error=str(error))


def collectives() -> None:
    """One process per GPU, or one on CPUs, of every pod: an all-reduce whose result is known."""
    count = "import torch; print(torch.cuda.device_count())"
    asked = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True)
    if asked.returncode:
        report("collective", error="the image has no torch that can be imported: " + asked.stderr.strip()[-300:])
        return
    num_gpus = int(asked.stdout.split()[-1])  # torch may print before it
    ranks = max(num_gpus, 1)
    logs = tempfile.mkdtemp()
    processes = []
    for local in range(ranks):
        environment = {
            **os.environ,
            "RANK": str(index() * ranks + local),
            "WORLD_SIZE": str(int(os.environ["WINDLASS_DEEP_PODS"]) * ranks),
            "LOCAL_RANK": str(local),
            "MASTER_ADDR": name_of(0),
            "MASTER_PORT": str(PORT + 1),
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_DEBUG_FILE": f"{logs}/{local}",
            "WINDLASS_DEEP_BACKEND": "nccl" if num_gpus else "gloo",
        }
        command = [sys.executable, "-c", os.environ["WINDLASS_DEEP_SOURCE"], "rank"]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    until = time.monotonic() + PATIENCE
    for process in processes:
        try:
            _, errors = process.communicate(timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            errors = f"no end within {PATIENCE:.0f} s"
        if process.returncode:
            report("collective", error=errors.strip()[-500:])
    if num_gpus:
        report("network", networks=networks("".join(path.read_text(errors="replace") for path in Path(logs).iterdir())))


def networks(log: str) -> list[str]:
    """What NCCL says it uses. A plugin that was loaded is no proof: where it fails, NCCL goes on with sockets."""
    used = set(re.findall(r"Using network ([^\r\n]+)", log))
    return sorted(used | {f"provider {name}" for name in re.findall(r"NET/OFI Selected [Pp]rovider is ([^\s,]+)", log)})


def rank() -> None:
    import torch
    import torch.distributed as dist

    backend = os.environ["WINDLASS_DEEP_BACKEND"]
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if backend == "nccl" else "cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    world = dist.get_world_size()
    for size, larger in zip(SIZES, (*SIZES[1:], 0), strict=True):
        values = torch.full((size // 4,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(values)
        expected = world * (world + 1) / 2
        wrong = int((values != expected).sum())
        seconds = []
        for _ in range(ROUNDS):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(values)
            if backend == "nccl":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        median = sorted(seconds)[ROUNDS // 2]
        moved = size * 8 * 2 * (world - 1) / world  # what a ring sends per rank
        if wrong or dist.get_rank() == 0:
            report(
                "collective",
                backend=backend,
                world=world,
                bytes=size,
                wrong=wrong,
                gbit_s=round(moved / median / 1e9, 4),
            )
        slowest = torch.tensor([median], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks stop at the same size
        if float(slowest) * larger / size > LONGEST:
            break
    dist.destroy_process_group()


def main() -> None:
    num_pods = int(os.environ["WINDLASS_DEEP_PODS"])
    receiver = Receiver() if num_pods > 1 else None
    first = resolve(name_of(0))
    if receiver is not None:
        receiver.start()
        following = resolve(name_of((index() + 1) % num_pods))
        if following:
            send(following)
        receiver.wait()
        wait_for_all(num_pods)
    if os.environ.get("WINDLASS_DEEP_FOLDER"):
        disk(os.environ["WINDLASS_DEEP_FOLDER"])
    if first or num_pods == 1:
        collectives()
    report("end")


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
