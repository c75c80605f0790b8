"""What a Python project asks for: pyproject.toml, setup.cfg, setup.py, uv.lock, environment.yml."""

from __future__ import annotations

import ast
import configparser
import posixpath
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from windlass.image.read.requirements import Place, Wanted, parse_requirements, wanted_of


class NotUnderstoodError(Exception):
    """Why a project cannot be read."""


def project_requirements(
    files: Mapping[str, str], folder: str, extras: Iterable[str] = (), groups: Iterable[str] = ()
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
        found = [wanted_of(one, _place(name, text or "", one)) for one in wanted]
    elif "poetry" in table.get("tool", {}):
        found = list(_poetry(name, text or "", table["tool"]["poetry"]))
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


def conda_environment(files: Mapping[str, str], name: str) -> tuple[list[tuple[str, Place]], list[Wanted]]:
    """Conda's packages and pip's of an environment file."""
    try:
        table = yaml.safe_load(files[name]) or {}
    except yaml.YAMLError as error:
        raise NotUnderstoodError(f"{name}: {error}") from None
    conda: list[tuple[str, Place]] = []
    pip: list[Wanted] = []
    for one in table.get("dependencies") or ():
        if isinstance(one, str):
            conda.append((one, _place(name, files[name], one)))
        elif isinstance(one, Mapping):
            for line in one.get("pip") or ():
                if str(line).startswith(("-r ", "--requirement")):
                    pip += _file(files, _in(posixpath.dirname(name), str(line).split()[-1]))
                elif not str(line).startswith("-"):
                    pip.append(wanted_of(str(line), _place(name, files[name], str(line))))
    return conda, pip


def _poetry(name: str, text: str, poetry: Mapping[str, Any]) -> Iterator[Wanted]:
    for package, value in poetry.get("dependencies", {}).items():
        version = value if isinstance(value, str) else value.get("version", "*") if isinstance(value, Mapping) else "*"
        if package.lower() != "python" and not (isinstance(value, Mapping) and value.get("optional")):
            yield wanted_of(f"{package}{_pep440(version)}", _place(name, text, package))


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


def _setup_py(files: Mapping[str, str], folder: str, extras: Iterable[str]) -> Iterator[Wanted]:
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
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            value = values.get(node.value.id, node.value) if isinstance(node.value, ast.Name) else node.value
            if isinstance(value, ast.List | ast.Tuple):
                for one in value.elts:
                    if isinstance(one, ast.Constant) and isinstance(one.value, str):
                        yield wanted_of(one.value, Place(name, one.lineno))
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
