"""A place to build in: own storage, a base image made of the machine's packages, and real registries on loopback."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from tests.image.wheels import Wheel, make_index

# A shell, Python with pip, and apt: everything that a Dockerfile of a test uses.
PACKAGES = (
    *("dash", "coreutils", "grep", "sed", "findutils", "tar", "gzip", "diffutils", "libc-bin", "base-files", "dpkg"),
    *("apt", "libstdc++6", "python3", "python3-pip"),
)
# What a planned Dockerfile asks apt for: there already, so that no test asks the network.
TOOLS = ("ca-certificates", "curl", "git", "gcc", "g++", "libc6-dev", "python3-dev")
LEFT_OUT = tuple(f"/usr/share/{name}" for name in ("doc", "man", "locale", "info", "lintian", "bash-completion"))
BASE = "localhost/machine:12"
BASE_WITH_TOOLS = "localhost/machine-with-tools:12"
USER, PASSWORD = "keeper", "open-sesame-4711"
PASSWORD_HASH = "$2b$05$1B75gPMHKEw/bEzFRNjvtecv5ocoffbc4Nvn0bl3ttfzuddGs67Su"


def why_not() -> str | None:
    """Why images cannot be built for real here."""
    if os.getuid() != 0:
        return "the image tests need root: they keep a container storage of their own"
    for program in ("buildah", "podman", "docker-registry", "dpkg-query", "/usr/bin/python3", "/usr/bin/pip3"):
        if not shutil.which(program):
            return f"{program} is not installed; .ci/run names the packages"
    return None


class Workplace:
    """Storage and settings of the container tools, apart from those of the machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graph = folder / "graph"
        (folder / "run").mkdir(parents=True)
        storage = f'[storage]\ndriver = "overlay"\ngraphroot = "{self.graph}"\nrunroot = "{folder / "run"}"\n'
        (folder / "storage.conf").write_text(storage)
        # Machines without CAP_SYS_RESOURCE cannot raise limits, and crun refuses a cgroup v2 beside v1; runc does not.
        runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
        containers = '[containers]\ndefault_ulimits = ["nofile=8192:8192", "nproc=8192:8192"]\n[engine]\n' + runtime
        (folder / "containers.conf").write_text(containers)
        (folder / "registries.conf").write_text("unqualified-search-registries = []\n")
        (folder / "home").mkdir()
        self.environment = {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
            "BUILDAH_ISOLATION": "chroot",
            "HOME": str(folder / "home"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "TMPDIR": str(folder),
            "DOCKER_HOST": f"unix://{folder / 'no-docker'}",  # docker comes first where it works, and may be the user's
        }

    def tool(self, *command: str, **options: str) -> str:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **self.environment, **options}
        )
        assert answer.returncode == 0, f"{' '.join(command)}: {answer.stderr}"
        return answer.stdout

    def make_base(self, wheels: list[Wheel]) -> str:
        """The base image; pip in it knows only the given wheels, so that no test asks the network."""
        return self._make_base(BASE, PACKAGES, wheels, "/wheels")

    def make_base_with_tools(self, wheels: str) -> str:
        """The base image with a compiler; pip in it knows only the wheels at an address."""
        return self._make_base(BASE_WITH_TOOLS, (*PACKAGES, *TOOLS), [], wheels)

    def _make_base(self, tag: str, packages: tuple[str, ...], wheels: list[Wheel], links: str) -> str:
        context = self.folder / tag.split("/")[1].replace(":", "-")
        shutil.rmtree(context, ignore_errors=True)  # made again where the address of the wheels is another
        context.mkdir()
        write_root(context / "root.tar", packages)
        make_index(context / "wheels", wheels)
        make_apt_repository(context / "debs", "make")
        (context / "sources.list").write_text("deb [trusted=yes] file:/debs ./\n")
        host = urllib.parse.urlsplit(links).hostname or "localhost"
        pip = f"[global]\nno-index = true\nfind-links = {links}\ntrusted-host = {host}\n"
        (context / "pip.conf").write_text(pip)
        (context / "Dockerfile").write_text(
            "FROM scratch\nADD root.tar /\nCOPY wheels /wheels\nCOPY debs /debs\nCOPY pip.conf /etc/pip.conf\n"
            "COPY sources.list /etc/apt/sources.list\n"
            "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
            "ENV PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1\n"
        )
        self.tool("buildah", "build", "--quiet", "--tag", tag, str(context))
        return tag

    def close(self) -> None:
        subprocess.run(
            ["buildah", "rm", "--all"], env={**os.environ, **self.environment}, capture_output=True, check=False
        )
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        for mount in sorted((line.split()[1] for line in mounts), reverse=True):
            if mount.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def write_root(archive: Path, packages: tuple[str, ...]) -> None:
    """The files of some packages and of all that they depend on, as dpkg knows them, and dpkg's record of them."""
    chosen = closure(packages)
    listed = _output("dpkg", "--listfiles", *sorted(chosen)).splitlines()
    files: set[str] = set()
    for name in listed:
        if name.startswith(LEFT_OUT) or not os.path.lexists(name) or name.endswith("/EXTERNALLY-MANAGED"):
            continue
        real = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))  # /bin is /usr/bin
        files.add(real)
    with tarfile.open(archive, "w") as tar:
        for link in ("bin", "sbin", "lib", "lib64"):
            _add(tar, link, tarfile.SYMTYPE, link=f"usr/{link}")
        for folder, mode in (("tmp", 0o1777), ("root", 0o700), ("var/tmp", 0o1777), ("etc", 0o755)):
            _add(tar, folder, tarfile.DIRTYPE, mode)
        for name in sorted(files - {"/.", "/tmp", "/root", "/var/tmp", "/etc"}):
            tar.add(name, recursive=False)
        _add(tar, "var/lib/dpkg/status", data=_status(chosen))
        _add(tar, "etc/passwd", data="root:x:0:0:root:/root:/bin/sh\n")
        _add(tar, "etc/group", data="root:x:0:\n")  # docker before 23 looks a USER up in it
        # As base-files makes it when it is installed: without it, names are looked up in DNS first.
        _add(tar, "etc/nsswitch.conf", data="passwd: files\ngroup: files\nhosts: files dns\n")
        _add(tar, "usr/bin/python", tarfile.SYMTYPE, link="python3")


def make_apt_repository(folder: Path, *names: str) -> None:
    """An apt repository with packages of this machine, put together again from the files that they installed."""
    folder.mkdir()
    index = []
    for name in names:
        tree = folder / name
        for file in _output("dpkg", "--listfiles", name).splitlines():
            if os.path.isfile(file) and not file.startswith(LEFT_OUT):
                (tree / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, tree / file.lstrip("/"), follow_symlinks=False)
        fields = ("Package", "Version", "Architecture", "Maintainer", "Depends", "Description")
        control = _output("dpkg-query", "-W", "-f", "".join(f"{one}: ${{{one}}}\n" for one in fields), name)
        (tree / "DEBIAN").mkdir()
        (tree / "DEBIAN" / "control").write_text(control)
        _output("dpkg-deb", "--build", "-Zgzip", str(tree), str(folder / f"{name}.deb"))
        shutil.rmtree(tree)
        data = (folder / f"{name}.deb").read_bytes()
        index.append(
            f"{control.strip()}\nFilename: ./{name}.deb\nSize: {len(data)}\n"
            f"SHA256: {hashlib.sha256(data).hexdigest()}\n"
        )
    (folder / "Packages").write_text("\n".join(index))


def closure(names: tuple[str, ...]) -> set[str]:
    """Installed packages that these need, themselves included."""
    needs: dict[str, list[str]] = {}
    provided: dict[str, str] = {}
    for line in _output(
        "dpkg-query", "-W", "-f", "${Package}\t${Status}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    ).splitlines():
        name, status, depends, provides = line.split("\t")
        if status.endswith(" installed"):
            needs[name] = re.sub(r"\([^)]*\)|\[[^]]*\]|:\w+", "", depends).split(",")
            for one in re.sub(r"\([^)]*\)", "", provides).split(","):
                provided.setdefault(one.strip(), name)
    found: set[str] = set()
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        name = name if name in needs else provided.get(name, "")
        if name and name not in found:
            found.add(name)
            for group in needs[name]:
                choices = [one.strip() for one in group.split("|")]
                wanted += [one for one in choices if one in needs or one in provided][:1]
    return found


class Registry:
    """Debian's docker-registry as a process, on a free port of loopback."""

    def __init__(self, folder: Path, *, locked: bool = False) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.locked = locked
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        lines = [
            "version: 0.1",
            f"storage: {{filesystem: {{rootdirectory: {folder}/data}}, delete: {{enabled: true}}}}",
            f"http: {{addr: '{self.host}'}}",
            "log: {level: error, accesslog: {disabled: true}}",
        ]
        if locked:
            (folder / "htpasswd").write_text(f"{USER}:{PASSWORD_HASH}\n")
            lines.append(f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}")
        (folder / "config.yml").write_text("\n".join(lines) + "\n")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                ["docker-registry", "serve", str(self.folder / "config.yml")], stdout=log, stderr=log
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "log").read_text()
            try:
                urllib.request.urlopen(f"http://{self.host}/v2/", timeout=5).close()
            except urllib.error.HTTPError:  # it answers, and wants a password
                return
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError((self.folder / "log").read_text())

    def stop(self) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait()
            self.process = None


def _status(chosen: set[str]) -> str:
    records = Path("/var/lib/dpkg/status").read_text(encoding="utf-8").split("\n\n")
    kept = [one for one in records if (found := re.match(r"Package: (\S+)", one.strip())) and found[1] in chosen]
    return "\n\n".join(one.strip() for one in kept) + "\n\n"


def _add(
    tar: tarfile.TarFile, name: str, kind: bytes = tarfile.REGTYPE, mode: int = 0o644, data: str = "", link: str = ""
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.linkname = kind, mode, len(data.encode()), link
    tar.addfile(info, io.BytesIO(data.encode()))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
