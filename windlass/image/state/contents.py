"""What the files of a package say beyond its metadata: what its build needs, and whether its imports are there."""

from __future__ import annotations

import ast
import io
import posixpath
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from windlass.image.state.fetch import BROKEN, Wheel, get_bytes, open_wheel
from windlass.image.state.resolver import Found, Index

COMPILED = re.compile(r"\.(c|cc|cpp|cxx|pyx|rs|cu)$")
# A condition that is true where a package is installed, and nothing else.
AVAILABLE = re.compile(r"^(?:not )?(?:\w+\.)*is_(\w+)_available\(\)$|^(?:not )?(?:HAS|HAVE)_(\w+)$")
SCANNED = re.compile(r"endswith\(['\"](\w*\.py)['\"]\)")
BACKENDS = ("scikit_build_core", "mesonpy")  # build backends that compile
OLD_PROTOC = "code that protoc before 3.19 generated"
PARSING = Lock()  # CPython 3.11 counts the depth of all threads together (github.com/python/cpython/issues/106905)
MOST_MODULES = 400  # of a package that are read; what imports more is not judged whole


@dataclass(frozen=True)
class Source:
    """What a source distribution takes to be built."""

    needs: str = ""  # nvcc or c++: setup.py imports torch and compiles; compiler, rust: without torch; or nothing
    imports: tuple[str, ...] = ()  # packages that setup.py imports, which isolation would bring
    requires: tuple[str, ...] = ()  # packages of [build-system]
    written: tuple[str, ...] = ()  # the same as they are written, with their versions
    fetches: bool = False  # setup.py looks for a ready wheel first
    detects: bool = False  # torch looks at the GPUs of the build to choose architectures
    calls_cmake: bool = False  # that neither it nor its build system brings
    cmake_minimum: str = ""  # of its CMakeLists.txt
    architectures: tuple[str, ...] = ()  # compute capabilities that setup.py compiles for, whatever nvcc it has
    own_flags: bool = False  # setup.py gives -gencode itself: torch then leaves TORCH_CUDA_ARCH_LIST alone
    looks: bool = False  # CUDA code is compiled only where setup.py sees a GPU, or a variable asks for it
    forced_by: tuple[str, ...] = ()  # those variables
    refuses: bool = False  # without either it ends with an error, in place of compiling for CPUs alone


def source_of(index: Index, name: str, version: str) -> Source:
    kept = index.kept("sources", [name, version], lambda: _source(index, name, version)) or {}
    imports, requires, written = (tuple(kept.get(key, ())) for key in ("imports", "requires", "written"))
    return Source(
        kept.get("needs", ""),
        imports,
        requires,
        written,
        kept.get("fetches", False),
        calls_cmake=kept.get("calls_cmake", False),
        cmake_minimum=kept.get("cmake_minimum", ""),
        architectures=tuple(kept.get("architectures", ())),
        own_flags=kept.get("own_flags", False),
    )


def imports_of(index: Index, importer: Found) -> list[list[str]]:
    """What importing a wheel takes from other packages without condition: module and name."""
    return index.kept("taken", importer.url, lambda: _imported(importer)) or []


def broken_import(index: Index, importer: Found, imported: Found | None, packages: Iterable[str]) -> str | None:
    """`EncoderDecoderCache of transformers`: what importing one wheel takes from another that has no such name."""
    below = tuple(f"{package}." for package in packages)
    for module, name in imports_of(index, importer):
        if not below or not f"{module}.".startswith(below):
            continue
        if imported is None:
            return module
        kept = index.kept("lacking-names", [imported.url, module, name], partial(_lacks, imported, module, name))
        if kept:
            return str(kept)
    return None


def modules_of(index: Index, wheel: Found) -> list[str]:
    """The packages that a wheel brings: PIL of pillow, google.protobuf of protobuf."""
    return index.kept("modules", wheel.url, lambda: _modules(wheel)) or []


def _modules(wheel: Found) -> list[str] | None:
    opened = open_wheel(wheel.url)
    if opened is None:
        return None
    tops = {name for name in opened.modules if "." not in name}
    within = {
        ".".join(name.split(".")[:2]) for name in opened.modules if "." in name and name.split(".")[0] not in tops
    }
    return sorted(name for name in tops | within if name in opened.modules)


def cuda_libraries(index: Index, wheel: Found) -> tuple[str, ...]:
    """`126` of libbitsandbytes_cuda126.so: the CUDA releases that a wheel has binaries for."""
    kept = index.kept("libraries", wheel.url, lambda: _cuda_libraries(wheel))
    return tuple((kept or "").split())


def _cuda_libraries(wheel: Found) -> str | None:
    opened = open_wheel(wheel.url)
    names = " ".join(opened.archive.namelist()) if opened else ""
    return " ".join(sorted(set(re.findall(r"_cuda(\d{3})\.so", names)))) if opened else None


def asserted_bounds(index: Index, wheel: Found) -> list[tuple[str, str]]:
    """`mmcv`, `2.2.0` of mmcv_maximum_version = "2.2.0": which versions a package refuses as it is imported."""

    def find() -> list[list[str]] | None:
        opened = open_wheel(wheel.url)
        text = opened.text(wheel.name.replace("-", "_")) if opened else None
        found = re.findall(r"(?m)^(\w+)_maximum_version\s*=\s*['\"]([\w.]+)['\"]", text or "")
        return [list(pair) for pair in found] if opened else None

    return [(name, version) for name, version in index.kept("asserted", wheel.url, find) or ()]


def torch_libraries(index: Index, name: str, version: str) -> tuple[str, ...]:
    """`2.2.1` of libgraphbolt_pytorch_2.2.1.so: the torch releases that a release of PyPI has libraries for."""

    def find() -> str | None:
        wheels = (url for url, _ in index.files(name, version) or () if "manylinux" in url)
        opened = open_wheel(next(wheels, None))
        if opened is None:
            return None
        made = set(re.findall(r"_pytorch_(\d+\.\d+\.\d+)\.so", " ".join(opened.archive.namelist())))
        return " ".join(sorted(made, key=Version))

    return tuple((index.kept("torch-libraries", [name, version], find) or "").split())


def _source(index: Index, name: str, version: str) -> dict[str, Any] | None:
    files = [url for url, _ in index.files(name, version) or ()]
    url = next((url for url in files if url.endswith(".tar.gz")), None)
    data = get_bytes(url) if url else None
    if data is None:
        return None
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            names = [getname.split("/", 1)[-1] for getname in archive.getnames()]
            setup, project = _member(archive, "setup.py"), _member(archive, "pyproject.toml")
            lists = _member(archive, "CMakeLists.txt")
    except BROKEN:
        return {}
    minimum = re.search(r"(?i)cmake_minimum_required\s*\(\s*VERSION\s+([\d.]+)(?!\S*\.\.\.)", lists)
    return {**_needs(setup, project, names, files), "cmake_minimum": minimum[1] if minimum else ""}


def source_in(files: Mapping[str, str], folder: str) -> Source:
    """What a project of the context takes to be built."""
    setup, project = (
        files.get(posixpath.normpath(posixpath.join(folder, name)), "") for name in ("setup.py", "pyproject.toml")
    )
    found = _needs(setup, project, [], [])
    chosen = re.search(r"gencode|generate-code|arch=|TORCH_CUDA_ARCH_LIST|get_device_capability", setup)
    try:
        condition, refuses = _condition(_parsed(setup))
    except (SyntaxError, ValueError):
        condition, refuses = "", False
    return Source(
        found.get("needs", ""),
        tuple(found.get("imports", ())),
        tuple(found.get("requires", ())),
        tuple(found.get("written", ())),
        detects="CUDAExtension" in setup and not chosen,
        looks="cuda.is_available()" in condition,
        forced_by=tuple(re.findall(r"(?:getenv\(|environ\.get\(|environ\[)['\"](\w+)['\"]", condition)),
        refuses=refuses,
        architectures=tuple(found.get("architectures", ())),
        own_flags=found.get("own_flags", False),
    )


def _condition(tree: ast.Module) -> tuple[str, bool]:
    """On what a setup.py makes a CUDAExtension, with its variables written out; and whether it refuses otherwise."""
    named: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            named |= {target.id: ast.unparse(node.value) for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            body = node.body if isinstance(node.body, list) else [node.body]
            if not any("CUDAExtension" in ast.unparse(part) for part in body):
                continue
            condition = ast.unparse(node.test)
            for _ in range(3):
                condition = re.sub(
                    r"(?<![\w.'\"])[A-Za-z_]\w*(?![\w.('\"])", lambda name: named.get(name[0], name[0]), condition
                )
            if "cuda.is_available()" in condition:
                refuses = isinstance(node, ast.If) and any(isinstance(part, ast.Raise) for part in node.orelse)
                return condition, refuses
    return "", False


def _needs(setup: str, project: str, names: Sequence[str], files: Sequence[str]) -> dict[str, Any]:
    """By the texts of setup.py and pyproject.toml; `names` of the files beside them, `files` of the release."""
    try:
        build = tomllib.loads(project).get("build-system", {})
        statements = list(_at_import(_parsed(setup)))
    except (SyntaxError, ValueError):
        return {}
    requires = [_project(text) for text in build.get("requires", ())]
    imports = {name.name.split(".")[0] for one in statements if isinstance(one, ast.Import) for name in one.names}
    imports |= {(one.module or "").split(".")[0] for one in statements if isinstance(one, ast.ImportFrom)}
    native = any(COMPILED.search(one) for one in names)
    compiles = re.search(r"ext_modules|Extension\(|cmake", setup) or str(build.get("build-backend")).startswith(
        BACKENDS
    )
    elsewhere = any(one.endswith(".whl") and not one.endswith("-any.whl") for one in files)  # for another Python
    needs = "compiler" if native and (compiles or elsewhere) else ""
    if "torch" in imports and "torch" not in requires:
        needs = "nvcc" if "CUDAExtension" in setup else "c++"
    elif {"setuptools-rust", "maturin"} & set(requires):
        needs = "rust"
    return {
        "needs": needs,
        "imports": sorted(imports),
        "requires": requires,
        "written": build.get("requires", []),
        "fetches": "urlretrieve" in setup,
        "architectures": _architectures(setup),
        "own_flags": "gencode" in setup and "TORCH_CUDA_ARCH_LIST" not in setup,
        "calls_cmake": bool(re.search(r"['\"]cmake['\"]", setup)) and not {"cmake", "scikit-build"} & set(requires),
    }


def _architectures(setup: str) -> list[str]:
    if re.search(r"(?i)cuda_version|bare_metal|version\(|get_device|TORCH_CUDA_ARCH_LIST", setup):
        return []  # chosen as it is built
    found = {digits for line in setup.splitlines() for digits in re.findall(r"compute_(\d{2,3})\b", line.split("#")[0])}
    return sorted(f"{digits[:-1]}.{digits[-1]}" for digits in found)


def _project(text: str) -> str:
    try:
        return canonicalize_name(Requirement(text).name)
    except InvalidRequirement:
        return text


def _member(archive: tarfile.TarFile, name: str) -> str:
    path = next(
        (getname for getname in archive.getnames() if getname.count("/") == 1 and getname.endswith(f"/{name}")), None
    )
    file = archive.extractfile(path) if path else None
    return file.read().decode(errors="replace") if file else ""


def _imported(importer: Found) -> list[list[str]] | None:
    """What `import package` takes from other packages without condition: (module, name), name "" for the module."""
    wheel = open_wheel(importer.url)
    if wheel is None:
        return None
    found: dict[tuple[str, str], None] = {}
    own = importer.name.replace("-", "_")
    waiting = [own] if own in wheel.modules else [module for module in wheel.modules if "." not in module]
    seen: set[str] = set()
    try:
        while waiting and len(seen) < MOST_MODULES:
            module = waiting.pop()
            text = wheel.text(module) if module not in seen else None
            seen.add(module)
            if text is None:
                continue
            for target, name in _taken(_parsed(text), module, wheel.modules[module].endswith("__init__.py")):
                if target.split(".")[0] in wheel.packages:
                    waiting += [target, f"{target}.{name}"]
                else:
                    found[target, name] = None
            if (
                ending := SCANNED.search(text)
            ) and "import_module(" in text:  # a package that imports all of its folder
                waiting += [
                    other
                    for other, file in wheel.modules.items()
                    if other.rpartition(".")[0] == module and file.endswith(ending[1])
                ]
        generated = next((wheel.text(module) for module in wheel.modules if module.endswith("_pb2")), None) or ""
    except (OSError, SyntaxError, ValueError, zipfile.BadZipFile):
        return None
    if "_descriptor.FieldDescriptor(" in generated:  # by a protoc before 3.19, whose code newer runtimes refuse
        found["google.protobuf.descriptor", OLD_PROTOC] = None
    return [list(pair) for pair in found]


def _parsed(text: str) -> ast.Module:
    with PARSING:
        return ast.parse(text)


def _at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """The statements that run without condition when a module is imported, and their expressions."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.If) and (guard := AVAILABLE.search(ast.unparse(node.test))):
            named = re.compile(rf"(?:from|import) {guard[1] or guard[2]}\b")
            waiting += [
                inner
                for inner in ast.walk(node)
                if isinstance(inner, ast.Import | ast.ImportFrom) and named.match(ast.unparse(inner))
            ]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Try | ast.If):
            continue
        yield node
        waiting += list(ast.iter_child_nodes(node))


def _taken(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, str]]:
    numpy: set[str] = set()
    for node in _at_import(tree):
        if isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            target = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((target, name.name) for name in node.names)
        elif isinstance(node, ast.Import):
            for name in node.names:
                numpy |= {name.asname or "numpy"} if name.name == "numpy" else set()
                yield name.name, ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "__import__":
            yield from ((str(given.value), "") for given in node.args[:1] if isinstance(given, ast.Constant))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in numpy:
            yield "numpy", node.attr  # which says itself what it has no more; names of others may be made as they run


def _lacks(imported: Found, module: str, name: str) -> str | None:
    """What is not there, in words; nothing where it is; None where the wheel is out of reach."""
    if name == OLD_PROTOC:
        return "" if Version(imported.version) < Version("4") else f"{module} for {name}"
    wheel = open_wheel(imported.url)
    if wheel is None:
        return None
    package = module.split(".")[0]
    if package not in wheel.packages:
        return module if package == "pkg_resources" else ""
    try:
        if module not in wheel.modules:
            compiled = any(one.startswith(f"{module.replace('.', '/')}.") for one in wheel.archive.namelist())
            folder = any(one.startswith(f"{module.replace('.', '/')}/") for one in wheel.archive.namelist())
            above = module.rpartition(".")[0]
            while above not in wheel.modules and "." in above:
                above = above.rpartition(".")[0]
            made = not wheel.modules.get(above, "__init__.py").endswith("__init__.py") or re.search(
                r"sys\.modules\[(?!__name__\])|extend_path|__path__", wheel.text(above) or ""
            )  # modules that are made as it runs
            return "" if compiled or folder or made else module
        expired = wheel.text(f"{package}._expired_attrs_2_0") if module == "numpy" else None
        if expired and re.search(rf'"{re.escape(name)}":', expired):
            return f"{name} of {module}"
        there = name in ("", "*") or f"{module}.{name}" in wheel.modules or _has(wheel, module, name)
        return "" if there else f"{name} of {module}"
    except (OSError, zipfile.BadZipFile):
        return None


def _has(wheel: Wheel, module: str, name: str) -> bool:
    """Whether a module mentions a name, itself or in what it imports whole; one of another package may have any."""
    text = wheel.text(module)
    if text is None:  # of another package, or compiled
        compiled = f"{module.replace('.', '/')}."
        return module.split(".")[0] not in wheel.modules or any(
            file.startswith(compiled) for file in wheel.archive.namelist()
        )
    if re.search(rf"(?<![\w.]){re.escape(name)}\b", text) or name.startswith("__") or module.endswith("_pb2"):
        return True
    if re.search(r"def __getattr__|_LazyModule|globals\(\)|setattr\(|import_module", text):  # made as it runs
        own = re.escape(name)
        made = re.compile(rf"(?m)^\s*(?:class|def|async def)\s+{own}\b|^{own}\b|['\"]{own}['\"]")
        native = any(file.endswith(".so") for file in wheel.archive.namelist())
        return native or any(made.search(wheel.text(other) or "") for other in wheel.modules)
    folder = f"{module.replace('.', '/')}/{name}"
    if any(one.startswith((f"{folder}.", f"{folder}/")) for one in wheel.archive.namelist()):
        return True
    whole = set(re.findall(r"from (\S+) import \*", text))
    return any(_has(wheel, f"{module}{record}" if record[0] == "." else record, name) for record in whole)
