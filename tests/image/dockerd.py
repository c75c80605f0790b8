"""A docker daemon of the tests' own: it has its storage, socket and network, and nothing of the machine's docker."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.image.rig import Workplace

PROGRAMS = os.environ.get("WINDLASS_TEST_DOCKER", "")  # a folder with another dockerd, docker and cli-plugins
SEARCH_PATH = ":".join(filter(None, (PROGRAMS, "/usr/bin", "/usr/sbin", os.environ.get("PATH"))))
BRIDGE, GROUP = "wl-dock", "windlass-docker-"  # each with the number of the process that made it
# It sees empty folders where the settings, the key and the sockets of the machine's docker and containerd are.
ENTER = """\
mount -t tmpfs tmpfs /run
if [ -d /etc/docker ]; then mount -t tmpfs tmpfs /etc/docker; fi
exec "$@"
"""


def why_not() -> str | None:
    """Why no daemon can be started here."""
    for program in ("dockerd", "docker", "containerd", "ip", "unshare"):
        if not shutil.which(program, path=SEARCH_PATH):
            return f"{program} is not installed; .ci/run names the packages"
    return None


class DockerDaemon:
    """dockerd in a mount and a process namespace of its own: when it ends, its mounts and containers are gone too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        number = os.getpid()
        self.bridge = f"{BRIDGE}{number}"
        self.gateway = f"198.18.{number % 256}.1"  # of the range that is set aside for tests (RFC 2544)
        self.group = f"{GROUP}{number}"
        self.process: subprocess.Popen[bytes] | None = None
        (folder / "bin").mkdir()
        (folder / "bin" / "docker").symlink_to(shutil.which("docker", path=SEARCH_PATH) or "docker")
        (folder / "client").mkdir()
        if PROGRAMS:
            (folder / "client" / "cli-plugins").symlink_to(Path(PROGRAMS, "cli-plugins").absolute())
        self.environment = {
            "DOCKER_HOST": f"unix://{folder / 'socket'}",
            "DOCKER_CONFIG": str(folder / "client"),
            "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', '')}",
        }

    def start(self) -> None:
        _sweep()
        self._ip("link", "add", self.bridge, "type", "bridge")
        self._ip("address", "add", f"{self.gateway}/24", "dev", self.bridge)
        self._ip("link", "set", self.bridge, "up")
        (self.folder / "daemon.json").write_text("{}\n")  # not the machine's /etc/docker/daemon.json
        daemon = [
            *("dockerd", "--config-file", self.folder / "daemon.json", "--pidfile", self.folder / "pid"),
            *("--data-root", self.folder / "data", "--exec-root", self.folder / "exec"),
            *("--host", f"unix://{self.folder / 'socket'}", "--group", "0"),
            *("--bridge", self.bridge, "--iptables=false", "--ip6tables=false", "--ip-forward=false"),
            *("--ip-masq=false", "--userland-proxy=false", "--cgroup-parent", f"/{self.group}"),
        ]
        apart = ["setpriv", "--pdeathsig", "KILL"]  # the daemon does not outlive these tests, however they end
        apart += ["unshare", "--mount", "--propagation", "slave", "--pid", "--mount-proc", "--fork", "--kill-child"]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*apart, "--", "sh", "-ec", ENTER, "sh", *map(str, daemon)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": SEARCH_PATH, "HOME": str(self.folder), "TMPDIR": str(self.folder)},
            )
        deadline = time.monotonic() + 120
        while self._docker("version").returncode:
            log_text = (self.folder / "log").read_text(errors="replace")
            assert self.process.poll() is None, log_text[-4000:]
            assert time.monotonic() < deadline, log_text[-4000:]
            time.sleep(0.2)

    def docker(self, *words: str, **environment: str) -> str:
        answer = self._docker(*words, **environment)
        assert answer.returncode == 0, f"docker {' '.join(words)}: {answer.stderr}"
        return answer.stdout

    def take_over(self, workplace: Workplace, image: str) -> None:
        """Load an image that buildah made."""
        archive = self.folder / "image.tar"
        workplace.tool("buildah", "push", "--quiet", image, f"docker-archive:{archive}:{image}")
        self.docker("load", "--input", str(archive))
        archive.unlink()

    def forget_images(self) -> None:
        """Be a machine that has no layer of any image."""
        self.docker("system", "prune", "--all", "--force")
        assert self.docker("image", "ls", "--quiet") == ""

    def stop(self) -> None:
        """End the daemon by its id, and give back what it had of the machine."""
        if self.process:
            for number, seconds in ((signal.SIGTERM, 30), (signal.SIGKILL, 30)):
                self._signal_daemon(number)
                try:
                    self.process.wait(seconds)
                    break
                except subprocess.TimeoutExpired:
                    continue
            else:
                raise AssertionError(f"dockerd {self.process.pid} does not end")
            self.process = None
        _give_back(os.getpid())
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal_daemon(self, number: int) -> None:
        """`unshare` waits for its one child, dockerd, and ends with it; dockerd is the namespace's first process."""
        assert self.process
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split() if children.exists() else ():
            os.kill(int(pid), number)

    def _docker(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        known: Mapping[str, str] = {**os.environ, **self.environment, **environment}
        return subprocess.run(["docker", *words], capture_output=True, text=True, check=False, env=known)

    @staticmethod
    def _ip(*words: str) -> None:
        answer = subprocess.run(["ip", *words], env={"PATH": SEARCH_PATH}, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, f"ip {' '.join(words)}: {answer.stderr}"


def _sweep() -> None:
    """Give back what sessions left that were killed."""
    made = [path.name.removeprefix(BRIDGE) for path in Path("/sys/class/net").glob(f"{BRIDGE}*")]
    made += [path.name.removeprefix(GROUP) for path in _groups(f"{GROUP}*")]
    for number in {int(one) for one in made if one.isdecimal()}:
        if not Path(f"/proc/{number}").exists():
            _give_back(number)


def _give_back(number: int) -> None:
    """The bridge and the control groups that a process made."""
    environment = {"PATH": SEARCH_PATH}
    subprocess.run(["ip", "link", "delete", f"{BRIDGE}{number}"], env=environment, capture_output=True, check=False)
    for group in _groups(f"{GROUP}{number}"):
        for folder, _, _ in os.walk(group, topdown=False):
            os.rmdir(folder)


def _groups(pattern: str) -> list[Path]:
    """At the top of the one hierarchy (cgroup v2) or of each (v1)."""
    root = Path("/sys/fs/cgroup")
    return [*root.glob(pattern), *root.glob(f"*/{pattern}")]
