"""Code that users bring, by import path: `my.module:name`. Looked for before a run starts, imported by its ranks."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from windlass.errors import UserError

GIVEN = "given"  # the module part of objects that windlass.train was given in this process
_given: dict[str, Any] = {}


def path_of(thing: Any, key: str) -> str:
    """The import path of an object; one that has none can be used by this process alone."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    try:
        if module and name and load(f"{module}:{name}", key) is thing:
            return f"{module}:{name}"
    except UserError:
        pass
    name = key.replace(".", "_")
    _given[name] = thing
    return f"{GIVEN}:{name}"


def load(path: str, key: str) -> Any:
    """The object that a key of the run file names."""
    module_name, _, name = path.partition(":")
    if module_name == GIVEN:
        if name not in _given:
            raise UserError(
                f"{key} is an object of the program that started this run",
                cause="it has no import path, so that no other process can find it",
                fix=f"define it at the top of a module: {key}=my.module:name",
            )
        return _given[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise  # the module is there, and imports something that is not
        raise _missing(path, key, f"there is no module {error.name}") from None
    thing: Any = module
    for part in name.split("."):
        if not hasattr(thing, part):
            raise _unnamed(path, key, part, dir(thing))
        thing = getattr(thing, part)
    return thing


def check(path: str, key: str, code: str | None) -> None:
    """Raise the UserError for what is not there, as far as that can be seen without running any of it."""
    module_name, _, name = path.partition(":")
    if module_name in (GIVEN, "__main__"):
        return
    parts = module_name.split(".")
    folder = Path(code).expanduser() if code else Path.cwd()
    for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
        if file.is_file():
            _check_defines(file, path, key, name.split(".")[0])
            return
    if importlib.util.find_spec(parts[0]) is None:
        raise _missing(path, key, f"neither {folder}/ nor this Python has a module {parts[0]}")


def use_folder(code: str | None) -> None:
    """Look for modules in the run's folder of code first. In a pod the code is on the path already."""
    if code and Path(code).expanduser().is_dir():
        folder = str(Path(code).expanduser().resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)


def source_digests(named: list[tuple[str, str]]) -> dict[str, str | None]:
    """By key, of the files that its objects are defined in; None where there is none, in a notebook say."""
    digests: dict[str, list[str | None]] = {}
    for key, path in named:
        digests.setdefault(key, []).append(_source_digest(path, key))
    return {key: ",".join(map(str, values)) if len(values) > 1 else values[0] for key, values in digests.items()}


def _source_digest(path: str, key: str) -> str | None:
    try:
        thing = load(path, key)
        file = inspect.getsourcefile(sys.modules[getattr(thing, "__module__", None) or path.partition(":")[0]])
        return hashlib.sha256(Path(file or "").read_bytes()).hexdigest()[:16]
    except (KeyError, OSError, TypeError, UserError):
        return None


def _check_defines(file: Path, path: str, key: str, name: str) -> None:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"{file} is no Python that can be read", evidence=str(error), cause=f"{key} is {path}"
        ) from None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    if name not in names and "*" not in names:
        raise _unnamed(path, key, name, sorted(names))


def _missing(path: str, key: str, evidence: str) -> UserError:
    return UserError(
        f"{_setting(key, path)} cannot be imported",
        evidence=evidence,
        cause="modules are looked for in the folder `code` of the run file, else in the current one",
        fix="code: FOLDER    in the run file",
    )


def _unnamed(path: str, key: str, name: str, known: list[str]) -> UserError:
    near = difflib.get_close_matches(name, known, 1)
    module = path.partition(":")[0]
    return UserError(
        f"{_setting(key, path)}: {module} has no {name!r}",
        fix=_setting(key, f"{module}:{near[0]}") if near else None,
    )


def _setting(key: str, path: str) -> str:
    """As it stands in a run file, where a dataset of one's own has a prefix."""
    return f"{key}=python:{path}" if key.startswith("data.") else f"{key}={path}"
