"""What verbs run inside pods: sent there as source, so it needs Python alone. Every answer is JSON on stdout."""

import contextlib
import glob
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
from typing import Any

CHUNK = 1 << 20
GPU_FIELDS = "index,utilization.gpu,memory.used,memory.total,temperature.gpu"


def usage() -> dict[str, Any]:
    """Memory, processor and GPU use of this pod."""
    before, begin = cpu_seconds(), time.monotonic()
    time.sleep(0.5)
    after, end = cpu_seconds(), time.monotonic()
    cpus = (after - before) / (end - begin) if before is not None and after is not None else None
    used, limit = memory()
    return {"memory": used, "memory_limit": limit, "cpus": cpus, "gpus": gpus()}


def memory() -> tuple[int | None, int | None]:
    """Bytes in use and allowed, of cgroup version 2 or 1; file cache that can be dropped does not count."""
    root = "/sys/fs/cgroup"
    for used_file, limit_file, stat_file, key in (
        ("memory.current", "memory.max", "memory.stat", "inactive_file"),
        ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        used = number(f"{root}/{used_file}")
        if used is not None:
            limit = number(f"{root}/{limit_file}")
            match = re.search(rf"^{key} (\d+)$", text(f"{root}/{stat_file}"), re.MULTILINE)
            dropped = int(match[1]) if match else 0
            return max(0, used - dropped), limit if limit is not None and limit < 1 << 60 else None
    return None, None


def cpu_seconds() -> float | None:
    match = re.search(r"^usage_usec (\d+)$", text("/sys/fs/cgroup/cpu.stat"), re.MULTILINE)
    if match:
        return int(match[1]) / 1e6
    for path in ("/sys/fs/cgroup/cpuacct/cpuacct.usage", "/sys/fs/cgroup/cpu,cpuacct/cpuacct.usage"):
        nanoseconds = number(path)
        if nanoseconds is not None:
            return nanoseconds / 1e9
    return None


def gpus() -> list[dict[str, int | None]]:
    """What nvidia-smi says of each GPU; nothing where there is none."""
    try:
        command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in answer.splitlines():
        values = [int(field) if field.strip().isdigit() else None for field in line.split(",")]
        if len(values) == 5:
            gpus.append(dict(zip(("index", "busy", "memory_mib", "memory_total_mib", "celsius"), values, strict=True)))
    return gpus


def resolve(name: str) -> dict[str, Any]:
    """The addresses of a name, how long the answer took and how often it had to be asked for."""
    begin = time.monotonic()
    for tries in (1, 2, 3, 4):
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses = sorted({str(answer[4][0]) for answer in answers})
            return {"addresses": addresses, "seconds": time.monotonic() - begin, "tries": tries}
        except socket.gaierror as error:
            problem = str(error)
            if error.errno != socket.EAI_AGAIN:  # a server that answered: there is no such name
                break
    return {"error": problem, "seconds": time.monotonic() - begin, "tries": tries}


def reach(host: str, port: str) -> dict[str, Any]:
    """Whether a TCP connection is made, and how long it took."""
    begin = time.monotonic()
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        return {"error": str(error), "seconds": time.monotonic() - begin}
    return {"seconds": time.monotonic() - begin}


def serve(seconds: str) -> dict[str, Any]:
    """Take what one peer sends and say how fast it came; the port is said first, on a line of its own."""
    listener = socket.socket()
    listener.bind(("", 0))
    listener.listen(1)
    listener.settimeout(float(seconds) + 30)
    print_json({"port": listener.getsockname()[1]})
    try:
        peer, _ = listener.accept()
    except OSError as error:
        return {"error": f"nobody came: {error}"}
    received, begin = 0, time.monotonic()
    peer.settimeout(30)
    with contextlib.suppress(OSError):
        while data := peer.recv(CHUNK):
            received += len(data)
    return {"bytes": received, "seconds": time.monotonic() - begin}


def send(host: str, port: str, seconds: str) -> dict[str, Any]:
    """Send to a peer for some time."""
    data, sent = b"\0" * CHUNK, 0
    try:
        peer = socket.create_connection((host, int(port)), timeout=10)
        begin = time.monotonic()
        while time.monotonic() - begin < float(seconds):
            sent += peer.send(data)
        peer.close()
    except OSError as error:
        return {"error": str(error), "bytes": sent}
    return {"bytes": sent, "seconds": time.monotonic() - begin}


def checkpoints(folder: str) -> list[dict[str, Any]]:
    """The checkpoints below a folder, complete or not."""
    rows = []
    for path in sorted(glob.glob(f"{folder}/step-*")):
        name = os.path.basename(path)
        if re.fullmatch(r"step-\d{8,}", name) and os.path.isdir(path):
            row: dict[str, Any] = {
                "step": int(name.removeprefix("step-")),
                "path": path,
                "bytes": size(path),
                "complete": False,
            }
            manifest = text(f"{path}/manifest.json")
            if manifest:
                with contextlib.suppress(ValueError, AttributeError, TypeError):
                    body = json.loads(manifest)
                    row.update({key: body.get(key) for key in ("created", "world_size", "tokens")})
                    row["bytes"] = sum(record["size"] for record in body["files"].values())
                row["complete"] = True
            rows.append(row)
    return rows


def tar(folder: str, names: str) -> None:
    """The named files of a folder as a tar stream on stdout."""
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", bufsize=CHUNK) as archive:
        for name in json.loads(names):
            archive.add(os.path.join(folder, name), arcname=name, recursive=False)


def part(path: str, begin: str, end: str) -> None:
    """Bytes of a file, as they are; to its end if `end` is 0."""
    with open(path, "rb") as file:
        file.seek(int(begin))
        sys.stdout.buffer.write(file.read(int(end) - int(begin)) if int(end) else file.read())


def move_aside(folder: str) -> dict[str, str | None]:
    """Give a folder the first free name of its kind; nothing is deleted."""
    if not os.path.isdir(folder):
        return {"name": None}
    number = 1
    while os.path.exists(f"{folder}.old-{number}"):
        number += 1
    os.rename(folder, f"{folder}.old-{number}")
    return {"name": f"{folder}.old-{number}"}


def signal_process(pid: str, name: str) -> None:
    os.kill(int(pid), getattr(signal, f"SIG{name}"))


def size(folder: str) -> int:
    return sum(os.path.getsize(os.path.join(here, file)) for here, _, files in os.walk(folder) for file in files)


def number(path: str) -> int | None:
    value = text(path).strip()
    return int(value) if value.isdigit() else None


def text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    answer = globals()[sys.argv[1]](*sys.argv[2:])
    if answer is not None:
        print_json(answer)
