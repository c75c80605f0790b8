"""Remedies for what the system lacks: compilers, headers, programs, libraries, and apt's own troubles. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from windlass.image.read.texts import Fix, lines_of, replace_lines
from windlass.image.remedies.case import Case

PROGRAMS = {
    "gcc": ["gcc", "libc6-dev"],
    "cc": ["gcc", "libc6-dev"],
    "x86_64-linux-gnu-gcc": ["gcc", "libc6-dev"],
    "aarch64-linux-gnu-gcc": ["gcc", "libc6-dev"],
    "g++": ["g++"],
    "c++": ["g++"],
    "make": ["make"],
    "cmake": ["cmake", "g++", "make"],
    "ninja": ["ninja-build"],
    "git": ["git", "ca-certificates"],
    "curl": ["curl", "ca-certificates"],
    "wget": ["wget", "ca-certificates"],
    "unzip": ["unzip"],
    "bzip2": ["bzip2"],
    "xz": ["xz-utils"],
    "pip": ["python3-pip"],
    "pip3": ["python3-pip"],
    "python3": ["python3"],
    "python": ["python3", "python-is-python3"],
    "cargo": ["cargo"],
    "rustc": ["rustc"],
    "pkg-config": ["pkg-config"],
    "pg_config": ["libpq-dev"],
    "mpicc": ["libopenmpi-dev", "openmpi-bin"],
    "gfortran": ["gfortran"],
    "swig": ["swig"],
    "ffmpeg": ["ffmpeg"],
    "sudo": ["sudo"],
    "ssh": ["openssh-client"],
    "patch": ["patch"],
    "jq": ["jq"],
}
HEADERS = {
    "Python.h": ["python3-dev"],
    "pyconfig.h": ["python3-dev"],
    "stdio.h": ["libc6-dev"],
    "stdlib.h": ["libc6-dev"],
    "limits.h": ["libc6-dev"],
    "libpq-fe.h": ["libpq-dev"],
    "ffi.h": ["libffi-dev"],
    "openssl/ssl.h": ["libssl-dev"],
    "openssl/opensslv.h": ["libssl-dev"],
    "zlib.h": ["zlib1g-dev"],
    "bzlib.h": ["libbz2-dev"],
    "lzma.h": ["liblzma-dev"],
    "sqlite3.h": ["libsqlite3-dev"],
    "jpeglib.h": ["libjpeg-dev"],
    "png.h": ["libpng-dev"],
    "sndfile.h": ["libsndfile1-dev"],
    "mpi.h": ["libopenmpi-dev"],
    "numa.h": ["libnuma-dev"],
    "infiniband/verbs.h": ["libibverbs-dev"],
    "libaio.h": ["libaio-dev"],
    "curl/curl.h": ["libcurl4-openssl-dev"],
    "libxml/xmlversion.h": ["libxml2-dev"],
    "hdf5.h": ["libhdf5-dev"],
    "hwloc.h": ["libhwloc-dev"],
    "yaml.h": ["libyaml-dev"],
}
LIBRARIES = {
    "libGL.so.1": ["libgl1"],
    "libgthread-2.0.so.0": ["libglib2.0-0"],
    "libglib-2.0.so.0": ["libglib2.0-0"],
    "libsndfile.so.1": ["libsndfile1"],
    "libgomp.so.1": ["libgomp1"],
    "libnuma.so.1": ["libnuma1"],
    "libibverbs.so.1": ["libibverbs1"],
    "librdmacm.so.1": ["librdmacm1"],
    "libxml2.so.2": ["libxml2"],
    "libstdc++.so.6": ["libstdc++6"],
    "libopenblas.so.0": ["libopenblas0"],
    "libmpi.so.40": ["libopenmpi3"],
    "libpq.so.5": ["libpq5"],
}
LINKED = {
    "pq": ["libpq-dev"],
    "z": ["zlib1g-dev"],
    "ssl": ["libssl-dev"],
    "crypto": ["libssl-dev"],
    "ffi": ["libffi-dev"],
    "aio": ["libaio-dev"],
    "numa": ["libnuma-dev"],
    "stdc++": ["g++"],
    "m": ["libc6-dev"],
    "c": ["libc6-dev"],
}
APT_NAMES = sorted(
    {name for table in (PROGRAMS, HEADERS, LIBRARIES, LINKED) for names in table.values() for name in names}
    | {"build-essential", "python3-venv", "ca-certificates", "vim", "htop", "tmux", "openssh-server", "rsync", "tini"}
)
INSTALL = re.compile(r"\b(apt(?:-get)?)((?:\s+-\S+)*\s+install)\b")


def missing_header(case: Case) -> Iterator[Fix]:
    found = case.log.find(r"fatal error: (\S+): No such file or directory")
    if found and found.match[1] in HEADERS:
        yield from case.apt_add(HEADERS[found.match[1]], f"the header {found.match[1]} is missing", found.line)


def missing_compiler(case: Case) -> Iterator[Fix]:
    found = case.log.find(
        r"command '(\S*?)' failed: No such file|unable to execute '(\S+?)': No such file|"
        r"([Cc]ould not find (?:a )?C compiler|No CMAKE_C_COMPILER)|(No CMAKE_CXX_COMPILER)"
    )
    if found:
        program = (found.match[1] or found.match[2] or ("g++" if found.match[4] else "gcc")).rsplit("/", 1)[-1]
        packages = PROGRAMS["g++" if "++" in program else "gcc"]
        yield from case.apt_add(packages, f"the compiler {program} is missing", found.line)
    if found := case.log.find(r"can't find Rust compiler|Cargo, the Rust package manager, is not"):
        yield from case.apt_add(["rustc", "cargo"], "a Rust compiler is missing", found.line)
    if found := case.log.find(r"CMake must be installed|[Cc]ould not find CMake"):
        yield from case.apt_add(PROGRAMS["cmake"], "CMake is missing", found.line)


def missing_program(case: Case) -> Iterator[Fix]:
    found = case.log.find(r"Cannot find command '(git)'") or case.log.find(
        r"(?:^|[/ ])(?:ba|da)?sh: (?:\d+: |line \d+: )?(?:[\w/]+/)?([\w.+-]+): (?:command )?not found"
    )
    found = found or case.log.find(r"Error: (pg_config) executable not found")
    if found and found.match[1] in PROGRAMS:
        yield from case.apt_add(PROGRAMS[found.match[1]], f"{found.match[1]} is missing", found.line)
    if found := case.log.find(r"No module named pip\b"):
        yield from case.apt_add(["python3-pip"], "pip is missing", found.line)
    if found := case.log.find(r"server certificate verification failed|unable to get local issuer certificate"):
        yield from case.apt_add(["ca-certificates"], "the image has no certificates", found.line)


def missing_library(case: Case) -> Iterator[Fix]:
    found = case.log.find(r"(lib[\w.+-]+\.so[\d.]*): cannot open shared object file")
    if found and found.match[1] in LIBRARIES:
        yield from case.apt_add(LIBRARIES[found.match[1]], f"{found.match[1]} is missing", found.line)
    found = case.log.find(r"ld: cannot find -l([\w+]+)")
    if found and found.match[1] in LINKED:
        yield from case.apt_add(LINKED[found.match[1]], f"lib{found.match[1]} is missing", found.line)


def apt_lists(case: Case) -> Iterator[Fix]:
    """A package that apt does not find: lists that are missing or old, another name, a misspelt one."""
    found = case.log.find(r"E: Unable to locate package (\S+)|E: Package '(\S+)' has no installation candidate")
    stale = case.log.find(r"(?:E: )?Failed to fetch \S+\s+404")
    if not (found or stale) or not case.failed:
        return
    evidence = found.line if found else stale.line if stale else ""
    first, last = case.failed.first, case.failed.last
    part = lines_of(case.dockerfile, first, last)
    if not re.search(r"\bapt(-get)?\s+(-\S+\s+)*update\b", part):
        after = INSTALL.sub(lambda match: f"{match[1]} update && {match[0]}", part, count=1)
        yield from case.fix(
            f"apt-update:{first}",
            "this step installs with the lists of an earlier layer, or none: update in the same step",
            replace_lines(case.dockerfile, first, last, after),
            evidence,
        )
    name = (found.match[1] or found.match[2]) if found else None
    if not name:
        return
    others = case.log.all(r"^\s\s(\S+)$") if case.log.find(r"the following packages replace it") else []
    near = [one.match[1] for one in others] + difflib.get_close_matches(name, APT_NAMES, 1, cutoff=0.75)
    if re.fullmatch(r"python3\.\d+(-\w+)?", name):
        near.append(re.sub(r"3\.\d+", "3", name))
    for other in near:
        after = re.sub(rf"(?<![\w.+-]){re.escape(name)}(?![\w.+-])", lambda _, new=other: new, part)  # type: ignore[misc]
        yield from case.fix(
            f"apt-rename:{name}={other}",
            f"apt has no {name}; install {other}",
            replace_lines(case.dockerfile, first, last, after),
            evidence,
        )


def apt_answers(case: Case) -> Iterator[Fix]:
    """Questions that apt asks while nobody is there."""
    found = case.log.find(r"Do you want to continue\?|^Abort\.$")
    if found and case.failed:
        first, last = case.failed.first, case.failed.last
        part = lines_of(case.dockerfile, first, last)
        after = INSTALL.sub(lambda match: f"{match[0]} -y", part)
        if not re.search(r"install\s+(-\S+\s+)*-\w*y", part):
            text = replace_lines(case.dockerfile, first, last, after)
            yield from case.fix("apt-yes", "apt asked whether to go on: answer -y", text, found.line)
    found = case.log.find(r"Please select the geographic area|debconf: unable to initialize frontend: Readline")
    if found and "DEBIAN_FRONTEND" not in case.dockerfile:
        text = case.before_failure("ENV DEBIAN_FRONTEND=noninteractive")
        yield from case.fix("noninteractive", "a package asked a question: ask none", text, found.line)


def not_root(case: Case) -> Iterator[Fix]:
    """An earlier USER took the rights that a step needs."""
    found = case.log.find(
        r"are you root\?|lock-frontend - open \(13: Permission denied\)|\[Errno 13\] Permission denied"
    )
    users = [one for one in case.recipe.dockerfile.instructions if one.keyword == "USER"]
    if not found or not case.failed:
        return
    before = [one for one in users if one.first < case.failed.first and one.stage == case.failed.stage]
    if before and before[-1].words not in ("root", "0"):
        own = before[-1].words
        lines = lines_of(case.dockerfile, case.failed.first, case.failed.last)
        text = replace_lines(
            case.dockerfile, case.failed.first, case.failed.last, f"USER root\n{lines.rstrip()}\nUSER {own}\n"
        )
        yield from case.fix("user-root", f"the step runs as {own} and needs root", text, found.line)
