"""What a Python project asks for: pyproject.toml, setup.cfg, setup.py, uv.lock, environment.yml."""

from __future__ import annotations

import ast
import configparser
import posixpath
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from packaging.markers import Marker
from packaging.utils import canonicalize_name

from windlass.image.read.requirements import Place, Wanted, parse_requirements, wanted_of


class NotUnderstoodError(Exception):
    """Why a project cannot be read."""


def project_requirements(
    files: Mapping[str, str], folder: str, extras: Collection[str] = (), groups: Collection[str] = ()
) -> list[Wanted]:
    """What `pip install FOLDER[extras]` asks for beside the project itself."""
    name = _in(folder, "pyproject.toml")
    text = files.get(name)
    table = _toml(name, text) if text is not None else {}
    project = table.get("project", {})
    found: list[Wanted] = []
    if "dependencies" in project or (project and "dependencies" not in project.get("dynamic", ())):
        wanted = [*project.get("dependencies", ())]
        for extra in extras:
            wanted += project.get("optional-dependencies", {}).get(extra, ())
        for group in groups:
            wanted += [one for one in table.get("dependency-groups", {}).get(group, ()) if isinstance(one, str)]
        sources = _uv_sources(table, set(extras))
        for one in (wanted_of(one, _place(name, text or "", one)) for one in wanted):
            index, repository = sources.get(one.name, (None, None))
            found.append(replace(one, index=index, url=repository or one.url))
    elif "poetry" in table.get("tool", {}):
        found = list(_poetry(name, text or "", table["tool"]["poetry"], groups))
    elif dynamic := table.get("tool", {}).get("setuptools", {}).get("dynamic", {}).get("dependencies"):
        for one in [dynamic["file"]] if isinstance(dynamic.get("file"), str) else dynamic.get("file", ()):
            found += _file(files, _in(folder, one))
    elif _in(folder, "setup.py") in files or _in(folder, "setup.cfg") in files:
        found = [*_setup_cfg(files, folder, extras), *_setup_py(files, folder, extras)]
    else:
        raise NotUnderstoodError(
            f"{folder or '.'} has no pyproject.toml, setup.py or setup.cfg that says what it needs"
        )
    return found


def python_of_project(files: Mapping[str, str], folder: str) -> str | None:
    text = files.get(_in(folder, "pyproject.toml"))
    value = _toml("pyproject.toml", text).get("project", {}).get("requires-python") if text else None
    return str(value) if value else None


def locked_requirements(files: Mapping[str, str], folder: str, options: list[str], uv: str) -> list[Wanted]:
    """What `uv sync` installs by its lock, as uv itself exports it."""
    lock = _in(folder, "uv.lock")
    with tempfile.TemporaryDirectory() as place:
        for name in (lock, _in(folder, "pyproject.toml")):
            Path(place, posixpath.basename(name)).write_text(files[name], encoding="utf-8")
        command = [uv, "export", "--frozen", "--no-hashes", "--no-header", "--no-annotate", "--no-emit-project", "-q"]
        done = subprocess.run(
            [*command, "--no-emit-workspace", "--project", place, *options], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise NotUnderstoodError(f"{lock}: uv export says {done.stderr.strip()[:200]}")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip() and not line.startswith(("#", "-e"))]
    return [wanted_of(line, _locked_place(lock, files[lock], line)) for line in lines]


def conda_environment(files: Mapping[str, str], name: str) -> tuple[list[tuple[str, Place]], list[Wanted], list[str]]:
    """Conda's packages and pip's of an environment file, and its channels."""
    try:
        table = yaml.safe_load(files[name]) or {}
    except yaml.YAMLError as error:
        raise NotUnderstoodError(f"{name}: {error}") from None
    conda: list[tuple[str, Place]] = []
    pip: list[Wanted] = []
    for dependency in table.get("dependencies") or ():
        if isinstance(dependency, str):
            conda.append((dependency, _place(name, files[name], dependency)))
        elif isinstance(dependency, Mapping):
            for line in dependency.get("pip") or ():
                if str(line).startswith(("-r ", "--requirement")):
                    pip += _file(files, _in(posixpath.dirname(name), str(line).split()[-1]))
                elif not str(line).startswith("-"):
                    pip.append(wanted_of(str(line), _place(name, files[name], str(line))))
    return conda, pip, [str(channel) for channel in table.get("channels") or ()]


def _uv_sources(table: Mapping[str, Any], extras: set[str]) -> dict[str, tuple[str | None, str | None]]:
    """[tool.uv.sources]: the index or the repository that a package is taken from, on Linux and with these extras."""
    uv = table.get("tool", {}).get("uv", {})
    indexes = {one.get("name"): one.get("url") for one in uv.get("index", ())}
    found: dict[str, tuple[str | None, str | None]] = {}
    for package, value in uv.get("sources", {}).items():
        for one in value if isinstance(value, list) else [value]:
            on_linux = "marker" not in one or Marker(one["marker"]).evaluate({"sys_platform": "linux"})
            if on_linux and one.get("extra", next(iter(extras), None)) in (*extras, None):
                repository = f"git+{one['git']}" if "git" in one else one.get("url")
                found[canonicalize_name(package)] = (indexes.get(one.get("index")), repository)
    return found


def _poetry(name: str, text: str, poetry: Mapping[str, Any], groups: Iterable[str]) -> Iterator[Wanted]:
    """The main group, and those asked for; a package from the source that it names."""
    sources = {one.get("name"): one.get("url") for one in poetry.get("source", ())}
    tables = [poetry, *(poetry.get("group", {}).get(group, {}) for group in groups)]
    for package, value in (pair for table in tables for pair in table.get("dependencies", {}).items()):
        said = value if isinstance(value, Mapping) else {"version": value if isinstance(value, str) else "*"}
        if package.lower() != "python" and not said.get("optional"):
            wanted = wanted_of(f"{package}{_pep440(said.get('version', '*'))}", _place(name, text, package))
            yield replace(wanted, index=sources.get(said.get("source")))


def _pep440(version: str) -> str:
    """Poetry's ^1.2.3 and ~1.2 as pip writes them."""
    caret = re.fullmatch(r"\^\s*(\d+)((?:\.\d+)*)(.*)", version)
    if caret:
        major = int(caret[1])
        minor = int((caret[2] or ".0").split(".")[1])
        above = f"{major + 1}" if major else f"0.{minor + 1}"
        return f">={caret[1]}{caret[2]},<{above}"
    tilde = re.fullmatch(r"~\s*(\d+(?:\.\d+)+)", version)
    if tilde:
        return f"~={tilde[1]}"
    return "" if version == "*" else f"=={version}" if re.match(r"\d", version) else version


def _setup_cfg(files: Mapping[str, str], folder: str, extras: Iterable[str]) -> Iterator[Wanted]:
    name = _in(folder, "setup.cfg")
    if name not in files:
        return
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(files[name])
    except configparser.Error as error:
        raise NotUnderstoodError(f"{name}: {error}") from None
    lines = parser.get("options", "install_requires", fallback="").split("\n")
    for extra in extras:
        lines += parser.get("options.extras_require", extra, fallback="").split("\n")
    for line in lines:
        if line.strip():
            yield wanted_of(line.strip(), _place(name, files[name], line.strip()))


def _setup_py(files: Mapping[str, str], folder: str, extras: Collection[str]) -> Iterator[Wanted]:
    """Lists of strings that setup.py gives or names; a requirements file that it mentions."""
    name = _in(folder, "setup.py")
    if name not in files:
        return
    text = files[name]
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise NotUnderstoodError(f"{name}: {error}") from None
    values = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def texts(node: ast.AST) -> Iterator[Wanted]:
        for one in ast.walk(node):
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                yield wanted_of(one.value, Place(name, one.lineno))

    for node in ast.walk(tree):
        if not isinstance(node, ast.keyword) or node.arg not in ("install_requires", "extras_require"):
            continue
        value = values.get(node.value.id, node.value) if isinstance(node.value, ast.Name) else node.value
        if node.arg == "extras_require":
            pairs = zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ()
            for key, listed in pairs:
                if isinstance(key, ast.Constant) and str(key.value) in extras:
                    yield from texts(values.get(listed.id, listed) if isinstance(listed, ast.Name) else listed)
        elif isinstance(value, ast.List | ast.Tuple):
            yield from texts(value)
        elif mentioned := re.search(r"['\"]([\w./-]*requirements[\w.-]*\.(?:txt|in))['\"]", text):
            yield from _file(files, _in(folder, mentioned[1]))
        else:
            raise NotUnderstoodError(f"{name}: what install_requires is, only running it would tell")


def _file(files: Mapping[str, str], name: str) -> list[Wanted]:
    if name not in files:
        raise NotUnderstoodError(f"{name} is not in the context")
    return list(parse_requirements(name, files).wanted)


def _toml(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotUnderstoodError(f"{name}: {error}") from None


def _place(name: str, text: str, part: str) -> Place:
    for number, line in enumerate(text.splitlines(), start=1):
        if part in line:
            return Place(name, number)
    return Place(name, 1)


def _locked_place(name: str, text: str, requirement: str) -> Place:
    package = re.split(r"[=<>!~\[ ;@]", requirement)[0]
    return _place(name, text, f'name = "{package}"')


def _in(folder: str, name: str) -> str:
    return posixpath.normpath(posixpath.join(folder, name))
