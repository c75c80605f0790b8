"""What an image starts: programs, the Python files of the context that run then, and what those use for certain."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from windlass.image.facts.table import facts
from windlass.image.read.installs import PYTHON
from windlass.image.read.shell import Command, script_commands
from windlass.image.read.texts import Texts
from windlass.image.state.files import copied_from
from windlass.image.state.model import State

WRAPPERS = ("tini", "dumb-init", "gosu", "nice", "numactl", "exec", "env", "conda", "uv", "poetry", "time")
ASIDE = re.compile(
    r"(^|/)(tests?|testing|bench\w*|examples?|docs?|scripts|tools|notebooks)/|(^|/)(test_|bench|conftest|setup\.py)"
)
MOST = 200  # modules that are followed


@dataclass(frozen=True)
class Use:
    """Something that a file of the context does for certain."""

    what: str
    file: str
    line: int


def started_commands(state: State, texts: Texts) -> list[Command]:
    """The commands of ENTRYPOINT and CMD, and of the scripts of the context that they name."""
    commands = [command for keyword in ("ENTRYPOINT", "CMD") for command in state.started.get(keyword, ())]
    for command in list(commands):
        for word in command.words:
            path = _file_at(texts.files, state, str(word)) if word.endswith(".sh") else None
            if path:
                commands += script_commands(texts.files[path], path, state.variables)
    return commands


def started_programs(state: State) -> list[str]:
    """The first word of each command, and of those that a wrapper starts."""
    found: list[str] = []
    for keyword in ("ENTRYPOINT", "CMD"):
        for command in state.started.get(keyword, ()):
            words = [str(word) for word in command.words]
            found.append(words[0])
            if command.program in WRAPPERS:
                found += [word for word in words[1:] if re.fullmatch(r"[\w./-]+", word) and not word.startswith("-")]
    return found


def uses_of_triton(texts: Texts, state: State) -> Iterator[Use]:
    """Where started code compiles GPU code as it runs, whatever its options say."""
    if {"TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"} & state.variables.keys():
        return
    yield from _started_by_name(texts, state)
    python = {name: text for name, text in {**texts.files, **texts.code}.items() if name.endswith(".py")}
    names = _started_files(texts, python, state)
    chosen = bool(names)
    if not names:
        starts = any(PYTHON.match(command.program) for command in started_commands(state, texts))
        names = [] if starts else [name for name in python if _is_copied(state, name) and not ASIDE.search(name)]
    seen: set[str] = set()
    words = [str(word) for command in started_commands(state, texts) for word in command.words]
    flags = frozenset(word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--"))
    waiting = [(name, "") for name in names]
    while waiting and len(seen) < MOST:
        name, importer = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        try:
            tree = ast.parse(python[name])
        except (SyntaxError, ValueError):
            continue
        if "suppress_errors" in python[name]:
            return
        yield from _uses(tree, name, importer, flags)
        if chosen:
            waiting += [(other, python[name]) for other in _imported(tree, name, python)]


def _started_by_name(texts: Texts, state: State) -> Iterator[Use]:
    """`vllm serve`, `python -m vllm.entrypoints…`; and a package that does nothing else, installed by its name."""
    known = facts()["triton_at_run_time"]
    for command in started_commands(state, texts):
        words = [str(word) for word in command.words]
        modules = [module.split(".")[0] for flag, module in pairwise(words) if flag == "-m"]
        for name in {command.program, *modules} & set(known["modules"]):
            if not any("eager" in word for word in words):
                yield Use(name, command.place.file, command.place.line)
    for _, package in state.everywhere:
        if package.name in known["packages"]:
            yield Use(package.name, package.where.cause.file, package.where.cause.line)


def _started_files(texts: Texts, python: Mapping[str, str], state: State) -> list[str]:
    found = []
    for command in started_commands(state, texts):
        words = [str(word) for word in command.words]
        named = [word for word in words if word.endswith(".py")]
        named += [f"{module.replace('.', '/')}{end}" for flag, module in pairwise(words)
                  if flag in ("-m", "--module") for end in (".py", "/__main__.py")]  # fmt: skip
        found += [path for word in named if (path := _file_at(python, state, word))]
    return found


def _file_at(files: Mapping[str, str], state: State, path: str) -> str | None:
    absolute = posixpath.normpath(posixpath.join(state.workdir, path))
    return next((inside for _, inside in copied_from(state, absolute) if inside in files), None)


def _is_copied(state: State, name: str) -> bool:
    return any(
        source in (".", name) or name.startswith(f"{source}/")
        for source in state.folders.values()
        if not source.startswith("git+")
    )


def _imported(tree: ast.Module, name: str, python: Mapping[str, str]) -> Iterator[str]:
    """The files of the context that a module imports."""
    beside = posixpath.dirname(name)
    roots = [beside, "", "src", *(posixpath.dirname(beside),)]
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            modules = [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
        for module in modules:
            path = module.replace(".", "/")
            for root in roots:
                for end in (".py", "/__init__.py"):
                    if (file := posixpath.normpath(posixpath.join(root, f"{path}{end}"))) in python and path:
                        yield file


def _uses(tree: ast.Module, name: str, importer: str, flags: frozenset[str]) -> Iterator[Use]:
    """Of a file that is started all of it counts; of one that is imported what the other names."""
    modules = facts()["triton_at_run_time"]["modules"]
    for node, within in _certain(tree, flags):
        if importer and within and not any(re.search(rf"\b{re.escape(one)}\b", importer) for one in within):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom) and not within:
            tops = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for top in {one.split(".")[0] for one in tops} & set(modules):
                if not ("enforce_eager" in ast.unparse(tree) and top == "vllm"):
                    yield Use(top, name, node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                if what := _compiles(decorator):
                    yield Use(what, name, decorator.lineno)
        elif isinstance(node, ast.Call) and (what := _compiles(node)):
            yield Use(what, name, node.lineno)
        elif isinstance(node, ast.keyword) and re.fullmatch(
            r"(torch_compile|use_liger_kernel)=True", ast.unparse(node)
        ):
            yield Use(f"{node.arg}=True", name, node.value.lineno)


def _compiles(node: ast.expr) -> str:
    called = node.func if isinstance(node, ast.Call) else node
    what = ast.unparse(called)
    if what not in ("torch.compile", "triton.jit"):
        return ""
    if isinstance(node, ast.Call) and what == "torch.compile":
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        backend = given.get("backend")
        plain = isinstance(backend, ast.Constant) and backend.value == "inductor"
        if "disable" in given or None in given or (backend is not None and not plain):
            return ""
    return what


def _certain(tree: ast.Module, flags: frozenset[str]) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """The nodes that no condition stands before but a flag of the command, and the functions that they are in."""
    waiting: list[tuple[ast.AST, tuple[str, ...]]] = [(node, ()) for node in tree.body]
    while waiting:
        node, within = waiting.pop(0)
        if isinstance(node, ast.Try | ast.IfExp | ast.BoolOp | ast.Match | ast.Lambda):
            continue
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            if "__name__" in test or (re.fullmatch(r"\w+\.\w+", test) and test.rpartition(".")[2] in flags):
                waiting = [(part, within) for part in node.body] + waiting
            continue
        yield node, within
        inner = within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*within, node.name)
        body = list(ast.iter_child_nodes(node))
        # What follows an early return of a function is not certain.
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stops = (n for n, part in enumerate(node.body) if isinstance(part, ast.If) and _leaves(part))
            body = list(node.body[: next(stops, len(node.body))])
        waiting = [(part, inner) for part in body] + waiting


def _leaves(node: ast.If) -> bool:
    return any(isinstance(part, ast.Return | ast.Raise) for part in node.body)
