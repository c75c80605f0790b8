"""What the files of a package say beyond its metadata: what its build needs, and whether its imports are there."""

from __future__ import annotations

import ast
import io
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping

from windlass.image.state.resolver import Found, Index, get_bytes

COMPILED = re.compile(r"\.(c|cc|cpp|cxx|pyx|rs|cu)$")
BACKENDS = ("scikit_build_core", "mesonpy", "maturin")  # build backends that compile


def source_needs(index: Index, name: str, version: str) -> str | None:
    """`nvcc` or `c++`: setup.py imports torch and compiles; `compiler`: without torch; None: nothing, or not known."""
    kept = index.kept("needs", [name, version], lambda: _source_needs(index, name, version))
    return str(kept) if kept else None


def broken_import(index: Index, importer: Found, imported: Found) -> str | None:
    """`EncoderDecoderCache of transformers`: what importing one pure wheel takes from another that has no such name."""
    kept = index.kept("imports", [importer.url, imported.url], lambda: _broken_import(importer, imported))
    return str(kept) if kept else None


def cuda_libraries(index: Index, wheel: Found) -> tuple[str, ...]:
    """`126` of libbitsandbytes_cuda126.so: the CUDA releases that a wheel has binaries for."""
    kept = index.kept("libraries", wheel.url, lambda: _cuda_libraries(wheel))
    return tuple((kept or "").split())


def _cuda_libraries(wheel: Found) -> str | None:
    """By the file names at the end of the wheel: it is too large to be fetched whole."""
    end = get_bytes(wheel.url, last=200_000) if wheel.url else None
    return None if end is None else " ".join(sorted(set(re.findall(r"_cuda(\d{3})\.so", end.decode("latin-1")))))


def _source_needs(index: Index, name: str, version: str) -> str | None:
    url = index.source_url(name, version)
    data = get_bytes(url) if url else None
    if data is None:
        return None
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            names = [getname.split("/", 1)[-1] for getname in archive.getnames()]
            setup, project = _member(archive, "setup.py"), _member(archive, "pyproject.toml")
    except tarfile.TarError:
        return ""
    build = tomllib.loads(project).get("build-system", {}) if project else {}
    if re.search(r"(?m)^(?:import|from) torch\b", setup) and "torch" not in " ".join(build.get("requires", ())):
        return "nvcc" if "CUDAExtension" in setup else "c++"
    native = any(COMPILED.search(one) for one in names)
    compiles = re.search(r"ext_modules|Extension\(|cmake", setup) or str(build.get("build-backend")).startswith(
        BACKENDS
    )
    return "compiler" if native and compiles else ""


def _member(archive: tarfile.TarFile, name: str) -> str:
    path = next(
        (getname for getname in archive.getnames() if getname.count("/") == 1 and getname.endswith(f"/{name}")), None
    )
    file = archive.extractfile(path) if path else None
    return file.read().decode(errors="replace") if file else ""


def _broken_import(importer: Found, imported: Found) -> str | None:
    texts, others = _modules(importer), _modules(imported)
    package = imported.name.replace("-", "_")
    if package not in others:
        return ""
    for module, name in _imports(texts, importer.name.replace("-", "_")):
        if module.split(".")[0] != package or "*" in name:
            continue
        if module not in others:
            return f"{module}"
        if f"{module}.{name}" not in others and not _names(others, module, name):
            return f"{name} of {module}"
    return ""


def _names(modules: Mapping[str, str], module: str, name: str) -> bool:
    """Whether a module mentions a name, itself or in what it imports whole; one of another package may have any."""
    text = modules.get(module)
    if text is None:
        return module.split(".")[0] not in modules
    if "def __getattr__" in text or re.search(rf"\b{re.escape(name)}\b", text):
        return True
    whole = set(re.findall(r"from (\S+) import \*", text))
    return any(_names(modules, f"{module}{record}" if record[0] == "." else record, name) for record in whole)


def _modules(wheel: Found) -> dict[str, str]:
    """The Python modules of a wheel by their dotted names."""
    data = get_bytes(wheel.url) if wheel.url else None
    if data is None:
        return {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {
            name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): archive.read(name).decode(
                errors="replace"
            )
            for name in archive.namelist()
            if name.endswith(".py")
        }


def _imports(texts: Mapping[str, str], package: str) -> Iterator[tuple[str, str]]:
    """What `import package` imports without condition, module by module: (module, name)."""
    waiting, seen = [package], set()
    while waiting:
        module = waiting.pop()
        if module in seen or module not in texts:
            continue
        seen.add(module)
        is_package = any(text.startswith(f"{module}.") for text in texts)
        for node in ast.parse(texts[module]).body:
            if not isinstance(node, ast.ImportFrom):
                continue
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            target = ".".join([*above, *([node.module] if node.module else [])])
            waiting += [target, *(f"{target}.{name.name}" for name in node.names)]
            if not node.level:
                yield from ((target, name.name) for name in node.names)
