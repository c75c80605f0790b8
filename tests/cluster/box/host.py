"""What the box takes from this machine (a control group, a bridge, a folder), and giving it back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.cluster.box.layout import BRIDGE, HOST, NAME, NODES, ROOT

CGROUPS = Path("/sys/fs/cgroup")
HIERARCHY = CGROUPS / "pids" if (CGROUPS / "pids").is_dir() else CGROUPS  # every process of ours is below it: v1, v2
SEARCH_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class BoxError(RuntimeError):
    """The box cannot do it; the message says why."""


def run(*command: str | Path, timeout: float = 60) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"PATH": SEARCH_PATH},
    )
    if result.returncode != 0:
        raise BoxError(f"{' '.join(map(str, command))}: {(result.stderr or result.stdout).strip()[-2000:]}")
    return result.stdout


def wait(condition: Callable[[], bool], what: str, seconds: float = 120, logs: Iterable[Path] = ()) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            tails = "".join(
                f"\n== {path}\n{path.read_text(errors='replace')[-1500:]}" for path in logs if path.exists()
            )
            raise BoxError(f"not within {seconds:.0f} s: {what}{tails}")
        time.sleep(0.1)


# --- control groups and processes


def _hierarchies() -> list[Path]:
    """Every mounted hierarchy; one on a machine with only cgroup v2."""
    if HIERARCHY == CGROUPS:
        return [CGROUPS]
    return [folder for folder in CGROUPS.iterdir() if folder.is_dir() and folder.name != "unified"]


def make_cgroups() -> None:
    for hierarchy in _hierarchies():
        for group in (hierarchy / NAME, *(hierarchy / NAME / node.name for node in NODES)):
            group.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):  # v1: a new group has none, and takes no process then
                if (group / setting).exists() and hierarchy.name == "cpuset":
                    (group / setting).write_text((hierarchy / setting).read_text())
    if HIERARCHY == CGROUPS:
        controllers = (CGROUPS / "cgroup.subtree_control").read_text().split()
        for group in (CGROUPS / NAME, *(CGROUPS / NAME / node.name for node in NODES)):
            (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
    for leaf in ("control", *(f"{node.name}/daemons" for node in NODES)):
        (HIERARCHY / NAME / leaf).mkdir(exist_ok=True)


def spawn(name: str, group: str, command: list[str | Path], environment: dict[str, str] | None = None) -> int:
    """Start a daemon in a control group of the box; its output goes to log/, its pid is kept."""
    enter = 'echo $$ > "$0" && exec "$@"'
    (ROOT / "log").mkdir(parents=True, exist_ok=True)
    with (ROOT / "log" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            ["sh", "-c", enter, str(HIERARCHY / NAME / group / "cgroup.procs"), *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"PATH": SEARCH_PATH, "HOME": "/root"} | (environment or {}),
        )
    (ROOT / "pid").mkdir(exist_ok=True)
    (ROOT / "pid" / name).write_text(json.dumps([process.pid, _birth(process.pid)]))
    _children.append(process)
    return process.pid


_children: list[subprocess.Popen[bytes]] = []  # kept, so that those that end while we live are not zombies


def reap() -> None:
    _children[:] = [child for child in _children if child.poll() is None]


def pid_of(name: str) -> int | None:
    """The daemon's pid, if it still lives."""
    path = ROOT / "pid" / name
    if not path.exists():
        return None
    pid, birth = json.loads(path.read_text())
    return int(pid) if pid in members() and _birth(pid) == birth else None


def _birth(pid: int) -> str | None:
    """When a process was started: with its number, a name that is never given twice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def members(group: str = "") -> set[int]:
    """Every process of the box, or of one of its groups."""
    found: set[int] = set()
    reap()
    for path in (HIERARCHY / NAME / group).rglob("cgroup.procs"):
        try:
            found.update(map(int, path.read_text().split()))
        except OSError:  # the group went away meanwhile
            continue
    return found


def kill_group(group: str = "", seconds: float = 60) -> None:
    """SIGKILL until none is left: what forks meanwhile is met in the next round."""
    deadline = time.monotonic() + seconds
    while pids := members(group):
        for pid in pids:
            kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise BoxError(f"these processes do not die: {sorted(pids)}")
        time.sleep(0.05)


def kill_pod(uid: str) -> None:
    """SIGKILL all that runs in a pod, its containers' first processes too, which no signal from inside can end."""
    box = HIERARCHY / NAME
    folders = list(box.rglob(f"pod{uid}"))
    if not folders:
        raise BoxError(f"no control group of pod {uid}")
    for folder in folders:
        kill_group(str(folder.relative_to(box)))


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def end(name: str, number: int = signal.SIGTERM, seconds: float = 20) -> None:
    """End one daemon: asked first, then made to."""
    pid = pid_of(name)
    if pid is None:
        return
    kill(pid, number)
    deadline = time.monotonic() + seconds
    while pid_of(name) == pid:
        if time.monotonic() > deadline:
            kill(pid, signal.SIGKILL)
        time.sleep(0.05)


# --- network


def make_bridge() -> None:
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{HOST}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


def links() -> list[str]:
    every = json.loads(run("ip", "-json", "link", "show") or "[]")
    ours = {BRIDGE, *(node.link for node in NODES)}
    return sorted(link["ifname"] for link in every if link["ifname"] in ours)


# --- giving it back


def sweep() -> None:
    """Remove everything of the box, whatever state it is in. Nothing here depends on a memory of what was started."""
    if (HIERARCHY / NAME).exists():
        kill_group()
    for mount in sorted(mounts(), reverse=True):
        subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
    for link in links():
        subprocess.run(["ip", "link", "delete", link], check=False, capture_output=True)
    wait(lambda: not links(), "interfaces removed", 30)
    wait(_remove_cgroups, "control groups removed", 30)
    if ROOT.exists():
        shutil.rmtree(ROOT)


def _remove_cgroups() -> bool:
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / NAME, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:  # busy for a moment after its last process
                return False
    return True


def mounts() -> list[str]:
    table = Path("/proc/self/mounts").read_text().splitlines()
    return [
        point for point in (line.split()[1] for line in table) if point == str(ROOT) or point.startswith(f"{ROOT}/")
    ]


def leftovers() -> list[str]:
    """What of a box is on this machine now: processes, mounts, interfaces, control groups, files. Empty: nothing."""
    found = [f"process {pid}" for pid in sorted(members())]
    found += [f"mount {mount}" for mount in mounts()]
    found += [f"interface {link}" for link in links()]
    found += [f"control group {hierarchy / NAME}" for hierarchy in _hierarchies() if (hierarchy / NAME).exists()]
    found += [f"folder {ROOT}"] if ROOT.exists() else []
    found += [f"process {pid}: {command}" for pid, command in _naming_root()]
    return found


def _naming_root() -> list[tuple[int, str]]:
    """Processes outside our control groups that were started for the box: their command line names its folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"{ROOT}/" in command:
                found.append((int(entry.name), command[:200]))
    return found
