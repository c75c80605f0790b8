"""A real Slurm on one host: munge, accounting, a controller and several slurmd, each with its own name and address.

Every node is a network, host-name and mount namespace, so that ports, addresses and host names are a node's own while
the file system is shared. Needs root and Debian's slurm-wlm, slurmdbd, slurm-wlm-mysql-plugin, mariadb-server, munge.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NETWORK = "10.79.0"
BRIDGE = "wlslurm"
LOCK = "/run/windlass-slurm-tests.lock"
PORT = 17810
NEEDED = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "mariadb-install-db", "ip", "unshare", "nsenter")
CPUS, GPUS, MEMORY = 8, 2, 160_000  # MB, more than there is: only a job that asks for little is killed for it
REQUEUE_SECONDS = 6  # Slurm keeps a requeued job waiting until its old credentials have expired
KILL_WAIT = 20
SLURMD_TIMEOUT = 8

_libc = ctypes.CDLL(None)


def why_not() -> str | None:
    """Why no cluster can be started here."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root (network namespaces)"
    missing = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test session leaves no daemon


class Cluster:
    def __init__(self, root: Path, nodes: int = 4, full_disk_bytes: int = 48 * 2**20) -> None:
        self.root = root
        self.nodes = [f"node{i}" for i in range(1, nodes + 1)]
        self.small_disk = root / "small-disk"
        self.full_disk_bytes = full_disk_bytes
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.host = socket.gethostname().split(".")[0]
        self.lock = -1

    @property
    def conf(self) -> Path:
        return self.root / "slurm.conf"

    def address(self, node: str) -> str:
        return f"{NETWORK}.{10 + int(node.removeprefix('node'))}"

    # --- life

    def start(self) -> None:
        # names, addresses and ports are fixed: one cluster at a time on a machine, whoever runs the tests
        self.lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.wait(self._have_lock, f"another test session holds {LOCK}", seconds=900)
        _remove_network(self.nodes)  # what a killed session left
        for name in ("state", "spool", "log", "dev", "munge", "pid", "mysql", "small-disk"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        # before the nodes: their mount namespaces are copies of this one
        _run("mount", "-t", "tmpfs", "-o", f"size={self.full_disk_bytes}", "tmpfs", str(self.small_disk))
        self._start_munge()
        self._start_accounting()
        self._write_configuration()
        self._make_network()
        self._spawn("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        for node in self.nodes:
            self.start_slurmd(node)
        self.wait(lambda: self.idle_nodes() == len(self.nodes), "all nodes idle")

    def stop(self) -> None:
        if not self.daemons:  # another session's cluster is up: nothing of it is ours
            return
        for name in ("slurmctld", *[n for n in self.daemons if n not in ("slurmctld",)]):
            if name in self.daemons:
                self.kill(name)
        _remove_network(self.nodes)
        subprocess.run(["umount", "-l", str(self.small_disk)], check=False, capture_output=True)
        os.close(self.lock)

    def _have_lock(self) -> bool:
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        daemon = self.daemons.pop(name)
        daemon.send_signal(number)
        daemon.wait(timeout=30)

    def start_slurmd(self, node: str) -> None:
        (self.root / "spool" / node).mkdir(exist_ok=True)
        inside = (
            f"hostname {node} && mount --bind {self.root}/hosts /etc/hosts && exec slurmd -D -N {node} -f {self.conf}"
        )
        self._spawn(
            node,
            # nsenter, not `ip netns exec`, which hides the control groups behind a fresh /sys
            ["nsenter", f"--net=/run/netns/{_netns(node)}", "unshare", "--uts", "--mount", "sh", "-c", inside],
        )

    def lose_node(self, node: str) -> None:
        """As if its power were cut: slurmd, batch script, ranks, everything."""
        self.kill(node)
        while pids := self.processes(node):
            _kill_all(pids)
            time.sleep(0.05)

    @contextlib.contextmanager
    def frozen_controller(self) -> Iterator[None]:
        """A controller that takes connections and answers none of them."""
        controller = self.daemons["slurmctld"]
        controller.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            controller.send_signal(signal.SIGCONT)

    def revive(self, node: str) -> None:
        """Wait until a node takes jobs again, whatever was done to it."""

        def up() -> bool:
            state = self.node_state(node)
            if state.startswith(("down", "drain")):
                command = ["scontrol", "update", f"nodename={node}", "state=resume"]
                subprocess.run(command, capture_output=True, timeout=30, check=False, env=self.environment())
            return state in ("idle", "mixed", "allocated")

        self.wait(up, f"{node} is back")

    # --- questions

    def processes(self, node: str) -> list[int]:
        return [int(pid) for pid in _output("ip", "netns", "pids", _netns(node)).split()]

    def node_state(self, node: str) -> str:
        return self.ask("sinfo", "-h", "-n", node, "-p", "debug", "-o", "%T")

    def ask(self, *command: str, timeout: float = 30) -> str:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=True, env=self.environment()
        ).stdout.strip()

    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": _path()}

    def idle_nodes(self) -> int:
        answer = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T"],
            capture_output=True, text=True, timeout=30, check=False, env=self.environment(),
        )  # fmt: skip
        return sum(line.endswith(" idle") for line in answer.stdout.splitlines())

    def wait(self, condition, what: str, seconds: float = 60) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds} s: {what}\n{self.last_words()}")
            time.sleep(0.1)

    def last_words(self) -> str:
        return "\n".join(
            f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-5:])
            for path in sorted((self.root / "log").glob("*"))
        )

    # --- parts

    def _spawn(self, name: str, command: list[str], **extra: str) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment(), **extra},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def _start_munge(self) -> None:
        key = self.root / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        at = {name: f"--{name}-file={self.root}/munge/{name}" for name in ("pid", "log", "seed")}
        self._spawn(
            "munged",
            ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self._munge}", *at.values()],
        )
        self.wait(self._munge.exists, "munge socket")

    @property
    def _munge(self) -> Path:
        return self.root / "munge" / "sock"

    def _start_accounting(self) -> None:
        data, sock = self.root / "mysql", self.root / "mysql.sock"
        install = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db"]
        _run(*install, "--auth-root-authentication-method=socket")
        server = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={sock}"]
        server += [f"--pid-file={self.root}/pid/mysql", "--bind-address=127.0.0.1", f"--port={PORT + 8}"]
        self._spawn("mariadbd", [*server, "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0"])
        self.wait(sock.exists, "database socket")
        _run(
            "mariadb", "-S", str(sock), "-e",
            "create database slurm_acct; create user slurm@127.0.0.1 identified by 'slurm'; "
            "grant all on slurm_acct.* to slurm@127.0.0.1",
        )  # fmt: skip
        conf = self.root / "slurmdbd.conf"
        conf.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={self._munge}\nDbdHost={self.host}\nDbdAddr=127.0.0.1\n"
            f"DbdPort={PORT + 9}\nSlurmUser=root\nLogFile={self.root}/log/slurmdbd.log\n"
            f"PidFile={self.root}/pid/slurmdbd.pid\nStorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\n"
            f"StoragePort={PORT + 8}\nStorageUser=slurm\nStoragePass=slurm\nStorageLoc=slurm_acct\n"
        )
        conf.chmod(0o600)
        self._spawn("slurmdbd", ["slurmdbd", "-D"], SLURM_CONF=str(conf))
        self.wait(lambda: _listens("127.0.0.1", PORT + 9), "slurmdbd")

    def _write_configuration(self) -> None:
        root = self.root
        for number in range(GPUS):  # copies of /dev/null: Slurm wants character devices
            os.mknod(root / "dev" / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        lines = [
            "ClusterName=windlasstest",
            f"SlurmctldHost={self.host}({NETWORK}.1)",
            f"SlurmctldPort={PORT}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self._munge},cred_expire={REQUEUE_SECONDS}",
            f"StateSaveLocation={root}/state",
            f"SlurmdSpoolDir={root}/spool/%n",
            f"SlurmctldPidFile={root}/pid/slurmctld.pid",
            f"SlurmdPidFile={root}/pid/%n.pid",
            f"SlurmctldLogFile={root}/log/slurmctld.log",
            f"SlurmdLogFile={root}/log/%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "ReturnToService=2",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU_Memory",
            f"DefMemPerCPU={MEMORY // CPUS}",
            "SlurmdParameters=config_overrides",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=bf_interval=3,sched_interval=3,sched_min_interval=0,batch_sched_delay=0",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "JobRequeue=1",
            f"KillWait={KILL_WAIT}",
            "MinJobAge=300",
            f"SlurmdTimeout={SLURMD_TIMEOUT}",
            "MessageTimeout=5",  # how soon a dead slurmd is missed depends on it too
            "InactiveLimit=0",
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={PORT + 9}",
            f"AccountingStoragePass={self._munge}",
            "JobAcctGatherType=jobacct_gather/linux",
            "JobAcctGatherFrequency=task=1",
            "JobAcctGatherParams=OverMemoryKill",
            "GresTypes=gpu",
        ]
        lines += [
            f"NodeName={node} NodeAddr={self.address(node)} NodeHostname={node} Port={PORT + 1} "
            f"CPUs={CPUS} RealMemory={MEMORY} Gres=gpu:{GPUS} Feature=small State=UNKNOWN"
            for node in self.nodes
        ]
        lines += [
            "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=5 PreemptMode=OFF",
            f"PartitionName=spot Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={KILL_WAIT}",
            "PartitionName=pair Nodes=node1,node2 MaxNodes=2 MaxTime=60 PriorityTier=5 PreemptMode=OFF",
            "PartitionName=closed Nodes=ALL AllowAccounts=astronomy PreemptMode=OFF",
        ]
        self.conf.write_text("\n".join(lines) + "\n")
        (root / "gres.conf").write_text(f"Name=gpu File={root}/dev/gpu[0-{GPUS - 1}]\n")
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        addresses = [f"{self.address(node)} {node}" for node in self.nodes]
        (root / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{NETWORK}.1 {self.host}", *addresses]) + "\n")

    def _make_network(self) -> None:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for node in self.nodes:
            space, veth = _netns(node), f"wlsv-{node}"
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", veth, "master", BRIDGE, "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "set", "eth0", "up")


def _netns(node: str) -> str:
    return f"wlslurm-{node}"


def _remove_network(nodes: list[str]) -> None:
    """Namespaces and what still runs in them: steps outlive a killed slurmd."""
    for node in nodes:
        _kill_all([int(pid) for pid in _output("ip", "netns", "pids", _netns(node)).split()])
        subprocess.run(["ip", "link", "del", f"wlsv-{node}"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", _netns(node)], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _run(*command: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _path()})
    if answer.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {answer.stderr.strip() or answer.stdout.strip()}")


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
