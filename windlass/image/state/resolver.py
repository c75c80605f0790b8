"""Ask uv which packages some requirements become, for a Python and a platform that are not this machine's.

Nothing is installed and nothing is built; only metadata is read. What is installed already is given as preferences, so
that it stays where the requirements allow it, as pip and uv do it. Answers are kept for a day.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from windlass.common.files import cache_root
from windlass.errors import UserError
from windlass.image.facts.table import companion_needs, facts, releases, table_stubs
from windlass.image.state.fetch import get, get_bytes, open_wheel, written_requires

PYPI = "https://pypi.org/simple"
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
TORCH_INDEX = re.compile(
    r"//(?:download(?:-r2)?\.pytorch\.org)/whl/(?:(?P<tag>cu\d+|cpu)\b|(?P<all>torch_stable\.html|$))"
)
NIGHTLY = re.compile(r"pytorch\.org/whl/(nightly|test)\b")
MIRRORS = re.compile(r"tuna\.tsinghua|aliyun|ustc\.edu|douban|cloud\.tencent|huaweicloud|sjtu\.edu|bfsu\.edu|nju\.edu")
UNREACHABLE = re.compile(
    r"(?i)failed to fetch|could not connect|error sending request|dns error|name or service not known|timed out|"
    r"connection refused|temporary failure|no route to host|network is unreachable|could not resolve host"
)
NO_WHEEL = re.compile(r"([A-Za-z0-9][\w.-]*?)((?:[<>=!~]=?[\w.*!]+,?)*) ha(?:s|ve) no usable wheels")
UV_GLIBC = (17, 28, *range(31, 41))  # the platforms manylinux_2_N that uv knows
SECONDS = 300
DAY = 24 * 3600.0


@dataclass(frozen=True)
class Stub:
    """A package that no index has as a wheel: its name, version and requirements are all that a resolver needs."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    tags: str = "py3-none-any"


@dataclass(frozen=True)
class Question:
    """What is asked of the resolver."""

    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ()
    python: str = "3.12"
    platform: str = "linux/amd64"
    glibc: str = "2.35"  # of the base image: a wheel for a newer one does not load; Alpine has musl
    index: str | None = None  # None: the machine's own
    extra_indexes: tuple[str, ...] = ()
    held: tuple[tuple[str, str], ...] = ()  # installed: kept where the requirements allow it
    stubs: tuple[Stub, ...] = ()
    by_uv: bool = False
    no_deps: bool = False
    prereleases: bool = False


@dataclass(frozen=True)
class Found:
    """One package of an answer."""

    name: str
    version: str
    wheel: str | None = None  # None: it would be built from its source
    url: str | None = None
    uploaded: str | None = None


@dataclass(frozen=True)
class Answer:
    """The packages; or the resolver's own words why there are none."""

    packages: tuple[Found, ...] = ()
    trouble: str | None = None
    checked: bool = True  # False: it could not be found out, an index was out of reach say
    notes: tuple[str, ...] = ()  # what was assumed
    unknown: tuple[str, ...] = ()  # what could not be asked


@dataclass
class Index:
    """The package indexes, and what they said before."""

    cache: Path = field(default_factory=lambda: _cache_folder())
    max_age: float | None = DAY  # None: recorded answers, however old
    offline: bool = False  # only recorded answers
    torch_index: bool | None = None  # whether download.pytorch.org is there; None: find out
    read: dict[str, Any] = field(default_factory=dict, repr=False)  # answers that this process has read

    def resolve(self, question: Question) -> Answer:
        if older := _before_the_table(question):
            return older
        key = _key("resolution", asdict(question))
        kept = self._kept(key, self.max_age)
        if kept is not None:
            return Answer(
                **{
                    **kept,
                    "packages": tuple(Found(**package) for package in kept["packages"]),
                    "notes": tuple(kept["notes"]),
                    "unknown": tuple(kept["unknown"]),
                }
            )
        if self.offline:
            return Answer(trouble="the index was not asked", checked=False)
        answer = self._resolve(question)
        if answer.checked:
            self._keep(key, asdict(answer))
        return answer

    def requires(self, found: Found) -> tuple[str, ...]:
        """Requires-Dist of a wheel, from its metadata."""
        needs = companion_needs(found.name, found.version)  # goes before what the wheel says, which may be too little
        own = [f"torch{needs}"] if needs else []
        if not found.url or not found.url.startswith("http"):
            return tuple(own)  # of a base image, or of torch's own index: the table says what companions need
        key = _key("metadata", found.url)
        kept = self._kept(key, None)
        if kept is None:
            text = None if self.offline else get(f"{found.url}.metadata")
            if text is None:
                return tuple(own)
            kept = re.findall(r"(?m)^Requires-Dist: (.+?)\r?$", text)
            if found.url.endswith(".tar.gz"):
                kept = written_requires(get_bytes(found.url) or b"")
            elif not text:  # not every index has it apart from the wheel
                wheel = open_wheel(found.url)
                kept = wheel.requires if wheel else own
            self._keep(key, kept)
        return tuple(one for one in kept if not own or not re.match(r"torch(?![\w-])", one)) + tuple(own)

    def prefetch(self, packages: Iterable[Found]) -> None:
        """The metadata of many wheels at once."""
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(self.requires, packages))

    def source(self, name: str, specifier: str = "") -> Stub | None:
        """What PyPI says of the newest release in a range that is there as source alone."""
        key = _key("written", [name, specifier])
        kept = self._kept(key, self.max_age)
        if kept is None and not self.offline:
            kept = _source(name, SpecifierSet(specifier))
            self._keep(key, kept)
        return Stub(name, kept["version"], tuple(kept["requires"])) if kept and kept["version"] else None

    def files(self, name: str, version: str) -> list[tuple[str, str]] | None:
        """Address and date of every file that PyPI has of a release; None: out of reach."""
        found: list[tuple[str, str]] | None = self.kept("files", [name, version], lambda: _files(name, version))
        return found

    def later(self, name: str, version: str) -> list[Found]:
        """The wheels of the next releases of a project, the nearest first."""
        found = self.kept("later", [name, version], lambda: _later(name, version), self.max_age)
        return [Found(name, release, wheel=url.rsplit("/", 1)[-1], url=url) for release, url in found or ()]

    def kept(self, kind: str, value: Any, find: Callable[[], Any], age: float | None = None) -> Any:
        """An answer that is kept once it is found, for ever where it never changes; None is asked again."""
        key = _key(kind, value)
        known = self._kept(key, None if self.max_age is None else age)
        if known is None and not self.offline and (known := find()) is not None:
            self._keep(key, known)
        return known

    def _resolve(self, question: Question) -> Answer:
        alone = question.index is not None and NIGHTLY.search(question.index)  # no PyPI beside it
        question, notes, unknown = self._reachable(question)
        if any(NIGHTLY.search(one) for one in unknown) and (question.prereleases or alone):
            return Answer(trouble="builds that change every day are not checked", checked=False, notes=notes)
        if missing := _not_on_torch_index(question):
            return Answer(trouble=missing, notes=notes)
        question = _without_torch_index(question)
        question = replace(question, stubs=(*question.stubs, *self._known_sources(question)))
        sources: dict[str, str] = {one.name: one.version for one in question.stubs}
        for _ in range(12):
            done, packages = _run(question)
            if packages is not None:
                held = {name for name, _ in question.held}
                found = tuple(
                    self._as_source(package)
                    if sources.get(package.name) == package.version
                    and package.name not in held
                    and not _is_table_stub(package, question)
                    else package
                    for package in packages
                )
                return Answer(found, notes=notes, unknown=unknown)
            lacking = NO_WHEEL.search(done)
            stub = self.source(canonicalize_name(lacking[1]), lacking[2]) if lacking else None
            if stub is None or stub in question.stubs:
                break
            sources[stub.name] = stub.version
            question = replace(question, stubs=(*question.stubs, stub))
        told = "\n".join(line for line in done.splitlines() if not line.startswith("warning:")).strip()
        if UNREACHABLE.search(told):
            address = re.search(r"https?://[^\s`'\")]+", told)
            cause = told.splitlines()[-1].replace("cause:", "").strip()
            told = f"the index cannot be reached: {address[0] if address else ''} {cause}"
            return Answer(trouble=told, checked=False, notes=notes, unknown=unknown)
        checked = "No solution found" in told
        checked = checked and not (unknown and re.search("not found|no version", told))
        return Answer(trouble=told, checked=checked, notes=notes, unknown=unknown)

    def _as_source(self, package: Found) -> Found:
        files = self.files(package.name, package.version) or ()
        url, uploaded = next(((url, day) for url, day in files if url.endswith(".tar.gz")), (None, None))
        return replace(package, wheel=None, url=url, uploaded=uploaded)

    def _reachable(self, question: Question) -> tuple[Question, tuple[str, ...], tuple[str, ...]]:
        """Indexes out of reach: a mirror is PyPI, torch's own is in the table, of others nothing is known."""
        notes: list[str] = []
        unknown: list[str] = []
        kept: list[str] = []
        for url in (*([question.index] if question.index else ()), *question.extra_indexes):
            is_torch = TORCH_INDEX.search(url)
            if self.torch_index if is_torch and self.torch_index is not None else answers(url):
                kept.append(url)
            elif is_torch:
                kept.append(url)
                notes.append(f"{url} is out of reach: its builds are taken from the table")
            elif MIRRORS.search(url):
                notes.append(f"{url} is taken to hold what PyPI holds")
            else:
                unknown.append(f"the index {re.sub(r'//[^/@]+@', '//…@', url)} is out of reach")
        index = question.index if question.index in kept else None
        return (
            replace(question, index=index, extra_indexes=tuple(one for one in kept if one != index)),
            tuple(dict.fromkeys(notes)),
            tuple(dict.fromkeys(unknown)),
        )

    def _known_sources(self, question: Question) -> list[Stub]:
        """The newest of packages whose source pip takes where uv without building would take an old wheel."""
        found = []
        for text in question.requirements:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            name = canonicalize_name(requirement.name)
            if name in facts()["only_source"]["names"] and not any(one.name == name for one in question.stubs):
                stub = self.source(name, str(requirement.specifier))
                found += [stub] if stub else []
        return found

    def _kept(self, key: str, max_age: float | None) -> Any:
        path = self.cache / f"{key}.json"
        try:
            if key not in self.read and (max_age is None or time.time() - path.stat().st_mtime <= max_age):
                self.read[key] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return self.read.get(key)

    def _keep(self, key: str, value: Any) -> None:
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            part = self.cache / f"{key}.{os.getpid()}.part"
            part.write_text(json.dumps(value), encoding="utf-8")
            part.replace(self.cache / f"{key}.json")
        except OSError:
            return  # a cache that cannot be written costs time, and nothing else


def _source(name: str, specifier: SpecifierSet) -> dict[str, Any]:
    text = get(f"https://pypi.org/pypi/{name}/json")
    project: dict[str, Any] = json.loads(text) if text else {"releases": {}, "info": {"version": None}}
    versions = [release for release, files in project["releases"].items() if files and release in specifier]
    chosen = max(versions, key=Version, default=None)
    if chosen is None:
        return {"version": None, "requires": []}
    if chosen == project["info"]["version"]:
        return {"version": chosen, "requires": project["info"].get("requires_dist") or []}
    url = next((url for url, _ in _files(name, str(chosen)) or () if url.endswith(".tar.gz")), None)
    return {"version": chosen, "requires": written_requires((get_bytes(url) if url else None) or b"")}


def _files(name: str, version: str) -> list[tuple[str, str]] | None:
    address = f"https://pypi.org/pypi/{name}/json"
    text = get(address)
    files = json.loads(text)["releases"].get(version, ()) if text else None
    return None if files is None else [(urljoin(address, file["url"]), file["upload_time"][:10]) for file in files]


def _later(name: str, version: str, most: int = 4) -> list[tuple[str, str]] | None:
    address = f"https://pypi.org/pypi/{name}/json"
    text = get(address)
    if not text:
        return None
    wheels = {
        Version(release): next((file["url"] for file in files if file["url"].endswith(".whl")), None)
        for release, files in json.loads(text)["releases"].items()
        if re.fullmatch(r"[\d.]+", release)
    }
    after = sorted(release for release in wheels if release > Version(version) and wheels[release])
    return [(str(release), urljoin(address, wheels[release] or "")) for release in after[:most]]


def find_uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise UserError("uv is not there, and nothing can be resolved", fix="pip install 'windlass[image]'")
    return found


def torch_tag(url: str) -> str | None:
    """`cu121`, `cpu` or `all` of an index of torch's own builds."""
    found = TORCH_INDEX.search(url)
    return (found["tag"] or "all") if found else None


def _without_torch_index(question: Question) -> Question:
    """The same question with the builds of torch's own index as stubs, and PyPI for the rest."""
    urls = (*([question.index] if question.index else ()), *question.extra_indexes)
    tags = [tag for url in urls if (tag := torch_tag(url))]
    if not tags:
        return question
    alone = torch_tag(question.index or "") is not None or question.by_uv  # PyPI's own torch is not taken then
    builds = [stub for tag in tags for stub in table_stubs(tag, question.python, question.platform)]
    stubs = [Stub(build["name"], build["version"], tuple(build["requires"]), build["tags"]) for build in builds]
    bounds = []
    for name in sorted({stub.name for stub in stubs}) if alone else ():
        known = sorted((stub.version.split("+")[0] for stub in stubs if stub.name == name), key=_order)
        bounds.append(f"{name}>={known[0]},<={known[-1]}")
    return replace(
        question,
        index=None if torch_tag(question.index or "") else question.index,
        extra_indexes=tuple(index for index in question.extra_indexes if not torch_tag(index)),
        stubs=(*question.stubs, *(stub for stub in stubs if stub not in question.stubs)),
        constraints=(*question.constraints, *bounds),
    )


def _before_the_table(question: Question) -> Answer | None:
    """A torch of torch's own index that the table does not reach back to: of the last of them the builds are known."""
    tags = [torch_tag(url) for url in (question.index or "", *question.extra_indexes)]
    asked = (re.match(r"torch==(\d[\d.]*\d)(?:\+(\w+))?$", text) for text in question.requirements)
    oldest = Version(releases()[-1].version)
    older = next((found for found in asked if found and Version(found[1]) < oldest), None)
    if not older or not any(tags):
        return None
    builds = facts()["torch_index"]["older_builds"].get(".".join(older[1].split(".")[:2]))
    tag = older[2] or tags[0]
    if builds and tag and tag not in ("all", *builds):
        words = f"Because {older[0]} was not found in the package registry (its builds are {', '.join(builds)})"
        return Answer(trouble=f"{words} and you require {older[0]}")
    return Answer(trouble=f"{older[0]} is older than the table of torch's own builds", checked=False)


def _not_on_torch_index(question: Question) -> str | None:
    """torch's own index, asked in place of PyPI, has little beside torch."""
    if torch_tag(question.index or "") is None or any(not torch_tag(index) for index in question.extra_indexes):
        return None
    tags = [torch_tag(url) or "" for url in (question.index or "", *question.extra_indexes)]
    served = {stub["name"] for tag in tags for stub in table_stubs(tag, question.python, question.platform)}
    for text in question.requirements:
        name = canonicalize_name(re.split(r"[\s\[=<>!~;@]", text, maxsplit=1)[0])
        others = any(re.fullmatch(package, name) for package in facts()["torch_index"]["packages"])
        if name not in served and (name == "torch" or not others):
            return f"Because {name} was not found in the package registry {question.index} and you require {text}"
    return None


def _is_table_stub(found: Found, question: Question) -> bool:
    return "+" in found.version and any(
        (stub.name, stub.version) == (found.name, found.version) for stub in question.stubs
    )


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _run(question: Question) -> tuple[str, list[Found] | None]:
    """What uv says, and the packages where it finds some."""
    machine = MACHINES[question.platform]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        links = folder / "links"
        links.mkdir()
        for stub in question.stubs:
            _write_stub(links, stub)
        (folder / "requirements.in").write_text("".join(f"{requirement}\n" for requirement in question.requirements))
        (folder / "constraints.txt").write_text("".join(f"{constraint}\n" for constraint in question.constraints))
        out = folder / "pylock.toml"
        if question.held:
            out.write_text(_preferences(question.held))
        command = [find_uv(), "pip", "compile", str(folder / "requirements.in"), "-c", str(folder / "constraints.txt")]
        command += ["--format", "pylock.toml", "-o", str(out), "--no-header", "--no-build", "--find-links", str(links)]
        command += ["--python-version", question.python, "--python-platform"]
        if question.glibc == "musl":
            command += [f"{machine}-unknown-linux-musl"]
        else:
            known = [minor for minor in UV_GLIBC if minor <= int(question.glibc.split(".")[1])]
            command += [f"{machine}-manylinux_2_{max(known)}"]
        command += ["--color", "never", "-q", "--no-config", "--no-python-downloads", "--python", sys.executable]
        command += ["--default-index", question.index] if question.index else []
        for url in question.extra_indexes:
            command += ["--find-links" if url.endswith(".html") else "--index", url]
        command += ["--index-strategy", "unsafe-best-match"]  # as pip does
        command += ["--no-deps"] if question.no_deps else []
        command += ["--prerelease", "allow"] if question.prereleases else []
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False, env=_environment(os.environ)
            )
        except subprocess.TimeoutExpired:
            return f"read timed out: no answer in {SECONDS} s", None
        if done.returncode:
            return done.stderr, None
        return "", [_found(package) for package in tomllib.loads(out.read_text()).get("packages", ())]


def _found(entry: Mapping[str, Any]) -> Found:
    wheels = entry.get("wheels") or ()
    # uv lists every wheel that fits; a compiled one is preferred over one for any machine, as pip does it.
    best = min(wheels, key=lambda one: one["url"].endswith("-any.whl"), default=None)
    uploaded = best.get("upload-time") if best else None
    return Found(
        canonicalize_name(entry["name"]),
        entry.get("version", ""),
        best["url"].rsplit("/", 1)[-1] if best else None,
        best["url"] if best else None,
        uploaded.date().isoformat() if uploaded else None,
    )


def _preferences(held: tuple[tuple[str, str], ...]) -> str:
    """An earlier lock: uv keeps its versions where the requirements allow them."""
    packages = "".join(f'[[packages]]\nname = "{name}"\nversion = "{version}"\n' for name, version in held)
    return f'lock-version = "1.0"\ncreated-by = "uv"\n{packages}'


def _write_stub(folder: Path, stub: Stub) -> None:
    name = stub.name.replace("-", "_")
    information = f"{name}-{stub.version}.dist-info"
    needs = "".join(f"Requires-Dist: {require}\n" for require in stub.requires)
    with zipfile.ZipFile(folder / f"{name}-{stub.version}-{stub.tags}.whl", "w") as wheel:
        wheel.writestr(
            f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {stub.name}\nVersion: {stub.version}\n{needs}"
        )
        wheel.writestr(f"{information}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {stub.tags}\n")
        wheel.writestr(f"{information}/RECORD", "")


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """What is set for pip holds for uv."""
    own = {"UV_HTTP_RETRIES": "1", **given}
    for pip, uv in (
        ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"),
        ("PIP_EXTRA_INDEX_URL", "UV_INDEX"),
        ("PIP_CERT", "SSL_CERT_FILE"),
    ):
        if given.get(pip) and not given.get(uv):
            own[uv] = given[pip]
    return own


@functools.cache
def answers(url: str) -> bool:
    """Whether the host of an index has an address."""
    host = urlsplit(url).hostname
    if url.startswith(("/", "file:")) or host in (None, "pypi.org", "localhost"):
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _key(kind: str, value: Any) -> str:
    return hashlib.sha256(f"{kind}\0{json.dumps(value, sort_keys=True)}".encode()).hexdigest()[:24]


def _cache_folder() -> Path:
    """One folder for each choice of the machine's own index: another index has other answers."""
    own = _environment(os.environ)
    indexes = [own[name] for name in ("UV_DEFAULT_INDEX", "UV_INDEX") if own.get(name)]
    folder = f"answers-{_key('machine', indexes)[:8]}" if indexes else "answers"
    return cache_root() / folder
