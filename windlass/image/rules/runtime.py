"""Rules about what fails when the image runs: compilers that are missing, scripts and Pythons that cannot start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from packaging.version import Version

from windlass.image.facts.table import facts
from windlass.image.read.requirements import Place
from windlass.image.rules.finding import Case, Finding
from windlass.image.rules.repairs import apt_install, devel_base
from windlass.image.state.model import Environment, Package, State
from windlass.image.state.started import started_programs, uses_of_triton

COMPILER = re.compile(r"(gcc|g\+\+|clang|gxx)(-\d+|_linux.*)?|cc|compilers|build-(essential|base)|(c|cxx)-compiler")
# Packages that may bring a compiler, where the archive that says so is out of reach.
MAY_BRING = re.compile(r"-dev$|cmake|libtool|auto(conf|make)|mpi|pip|build|llvm|fortran|cython|headers|dkms|cuda|full$")
DRIVER = re.compile(r"nvidia-(driver|utils|compute-utils|headless)-\d+\S*|libnvidia-compute-\d+\S*|cuda-drivers\S*")
WITH_DRIVER = re.compile(r"cuda(-\d+-\d+)?|cuda-runtime-\d+-\d+")


def compiles_at_run_time(case: Case) -> Iterator[Finding]:
    """torch.compile and Triton kernels are compiled where they run: with a C compiler, and with Python.h."""
    final = case.trace.final
    use = next(iter(uses_of_triton(case.texts, final)), None)
    if use is None or case.node.cpu_only or not case.node.gpu or final.programs is None:
        return
    start, base = _start_line(final), case.base_where()
    runs = f"as {case.texts.name}:{start} runs it" if start else "as it runs"
    at = replace(base, cause=Place(use.file, use.line)) if use.line else base
    if not _has_compiler(final):
        if final.unread and any(MAY_BRING.search(name) for name in final.apt):
            case.trace.unknown.append(f"{at}: whether a C compiler comes along, which {use.what} needs as it runs")
            return
        last = case.where_of(start) if start else base
        yield case.error(
            "missing-compiler",
            f"{use.what} of {use.file} compiles GPU code {runs}, and neither {final.base.image} nor a step "
            "brings a C compiler: Failed to find C compiler",
            at,
            *apt_install(case, last, "gcc libc6-dev"),
        )
    elif _lacks_headers(final):
        where = final.apt.get("python3") or next(
            (where for name, where in final.apt.items() if re.fullmatch(r"python3(\.\d+)?(-pip|-venv)?", name)), at
        )
        yield case.error(
            "missing-header",
            f"{use.what} of {use.file} compiles GPU code {runs}, and nothing installs the headers of the "
            "system's Python: Python.h is not there",
            replace(where, cause=at.cause),
            *apt_install(case, case.where_of(start) if start else where, "python3-dev"),
        )


def _start_line(state: State) -> int | None:
    """The line of the command that the image starts."""
    started = state.started.get("CMD") or state.started.get("ENTRYPOINT") or ()
    return next((command.place.line for command in started), None)


def _has_compiler(state: State) -> bool:
    named = {*(state.programs or ()), *state.brought, *state.apt}
    named |= {name for environment in state.environments.values() for name in environment.packages}
    given = state.variables.get("CC", "gcc").rsplit("/", 1)[-1]
    return any(COMPILER.fullmatch(name) for name in named) or not COMPILER.fullmatch(given)


def _lacks_headers(state: State) -> bool:
    of_system = state.environment.interpreter.startswith("/usr/bin/") and state.base.family in ("cuda", "system")
    packaged = any(re.fullmatch(r"(lib)?python3(\.\d+)?-(dev|full)", name) for name in state.brought)
    unsure = state.unread and any(re.search("boost|opencv|mpi|all-dev", name) for name in state.apt)
    return of_system and "headers" not in (state.programs or ()) and not packaged and not unsure


def deepspeed_operators(case: Case) -> Iterator[Finding]:
    """deepspeed looks for nvcc as it is imported, or compiles the optimizer of its configuration with it."""
    final, known = case.trace.final, facts()["deepspeed"]
    if case.node.cpu_only or not case.node.gpu or final.nvcc or not final.nvcc_known:
        return
    for _, package in final.everywhere:
        if package.name != "deepspeed" or not package.version or final.variables.get("DS_ACCELERATOR"):
            continue
        if package.at_least(known["asks_at_import"]) and not package.at_least(known["asks_no_more"]):
            why = "asks nvcc for its version as it is imported where there is a GPU: CUDA_HOME does not exist"
        elif (file := _own_optimizer(case)) and not _built_in(package):
            why = f"compiles the optimizer of {file} with nvcc at its first use"
        else:
            continue
        yield case.error(
            "no-nvcc",
            f"deepspeed {package.version} {why}; {final.base.image} has no nvcc",
            package.where,
            *devel_base(case, package),
        )
        return


def _built_in(package: Package) -> bool:
    made = package.compiled.variables if package.compiled else {}
    return any(name.startswith("DS_BUILD_") and value in ("1", "true") for name, value in made.items())


def _own_optimizer(case: Case) -> str | None:
    """A configuration of deepspeed whose Adam is deepspeed's own: fused on the GPU, or on the CPU for offloading."""
    for name, text in {**case.texts.files, **case.texts.code}.items():
        if not name.endswith(".json") or "zero_optimization" not in text:
            continue
        try:
            value: Any = json.loads(text)
        except ValueError:
            continue
        optimizer = value.get("optimizer", {}) if isinstance(value, dict) else {}
        kind = str(optimizer.get("type", "")).lower() if isinstance(optimizer, dict) else ""
        if kind in ("adam", "adamw", "lamb", "onebitadam") and not optimizer.get("params", {}).get("torch_adam"):
            return name
    return None


def moved_environment(case: Case) -> Iterator[Finding]:
    """A virtual environment that was copied to another path: its scripts name the Python of the old one."""
    final = case.trace.final
    for environment in final.environments.values():
        old = environment.scripts
        if not environment.is_moved or environment.moved is None or old in final.environments:
            continue
        for program in started_programs(final):
            if _is_script(program, environment, final):
                yield case.error(
                    "copied-environment",
                    f"{program.rsplit('/', 1)[-1]}, which {case.texts.name}:{_start_line(final)} starts, begins with "
                    f"#!{old}/bin/python, which is not there: the environment was made in {old}, and its scripts keep "
                    "that path",
                    environment.moved,
                )
                return


def _is_script(program: str, environment: Environment, state: State) -> bool:
    name = program.rsplit("/", 1)[-1]
    package = facts()["scripts"]["packages"].get(name, name.replace("_", "-"))
    own = package in environment.packages or name == "pip"
    found = state.environments.get(state.active) is environment if "/" not in program else False
    return own and (found or program == f"{environment.prefix}/bin/{name}")


def interpreter_of_root(case: Case) -> Iterator[Finding]:
    """A Python below /root, which nobody but root may enter, and another user who starts it."""
    final = case.trace.final
    user, environment = final.user.split(":")[0], final.environment
    if user in ("root", "0", "") or "$" in user or final.owners.get("/root") == "given away":
        return
    first = re.match(r"(/root/[^:]*(?:conda|mamba|forge|pyenv|venv)[^:]*)/bin(:|$)", final.variables.get("PATH", ""))
    paths = [environment.prefix, first[1] if first else ""]
    paths += [environment.interpreter] if environment.interpreter in final.interpreters else []
    path = next((path for path in paths if path.startswith("/root/")), None)
    started = [program.rsplit("/", 1)[-1] for program in started_programs(final)]
    if path is None or not any(re.match(r"python|pip|torchrun|accelerate|deepspeed|uv", name) for name in started):
        return
    where = next(
        (
            case.where_of(instruction.first)
            for stage in reversed(case.stages())
            for instruction in reversed(stage.instructions)
            if instruction.keyword == "USER"
        ),
        case.base_where(),
    )
    yield case.error(
        "permission",
        f"{user} starts a Python at {case.texts.name}:{_start_line(final)} that is in {path}, and /root is closed to "
        "all but root: permission denied"
        f"{'; UV_PYTHON_INSTALL_DIR names another folder' if '/uv/' in path else ''}",
        where,
    )


def library_order(case: Case) -> Iterator[Finding]:
    """LD_LIBRARY_PATH that puts the older cuDNN of the base image before the one that torch brings."""
    final, torch = case.trace.final, case.trace.final.torch
    value, where = final.variables.get("LD_LIBRARY_PATH", ""), final.exported.get("LD_LIBRARY_PATH")
    if where is None or torch is None or torch.origin != "pip" or not final.base.cudnn:
        return
    own = next(
        (one for name, one in final.packages.items() if name.startswith("nvidia-cudnn-cu") and one.version), None
    )
    tag = re.match(r"\d+\.\d+\.\d+", final.base.tag or "")
    has = facts()["base_cudnn"]["versions"].get(tag[0]) if tag and final.base.family == "cuda" else None
    named = re.search(r"(^|:)/(usr/)?lib(/(x86_64|aarch64)-linux-gnu)?/?(:|$)", value)
    if not (own and has and named) or Version(has).major != Version(own.public).major:
        return
    if Version(has).release[:2] < Version(own.public).release[:2]:
        yield case.error(
            "library-path",
            f"LD_LIBRARY_PATH puts cuDNN {has} of {final.base.image} before the {own.public} that torch "
            f"{torch.version} brings and is compiled with: cuDNN version incompatibility",
            where,
        )


def efa_folder(case: Case) -> Iterator[Finding]:
    """EFA that is copied from another stage leaves ld.so.conf behind: LD_LIBRARY_PATH names the plugin's own folder."""
    final, known = case.trace.final, facts()["efa"]
    value, where = final.variables.get("LD_LIBRARY_PATH", ""), final.exported.get("LD_LIBRARY_PATH")
    version = final.efa if final.efa and final.efa != "latest" else known["installer"]
    told = any(re.search(r"ld\.so\.conf|ldconfig", one.text) for one in case.stages()[-1].instructions)
    if not final.efa_copied or where is None or told or Version(version) < Version(known["plugin_since"]):
        return
    if final.ofi or final.ofi_prefix or "/" in final.variables.get("NCCL_NET_PLUGIN", ""):
        return
    folders = [folder.rstrip("/") for folder in value.split(":")]
    inside = [folder for folder in folders if folder.startswith("/opt/amazon/ofi-nccl/lib")]
    if not inside and "amazon" in value:
        yield case.error(
            "efa-not-found",
            f"LD_LIBRARY_PATH does not name /opt/amazon/ofi-nccl/lib, where EFA installer {version} puts NCCL's "
            "plugin, and /etc/ld.so.conf.d is not copied with it: NCCL falls back to TCP",
            where,
        )


def driver_in_image(case: Case) -> Iterator[Finding]:
    """The driver's libraries come from the node; those of an image are of another version."""
    final = case.trace.final
    if case.node.cpu_only or not case.node.gpu:
        return
    for name, where in final.apt.items():
        if DRIVER.fullmatch(name) or WITH_DRIVER.fullmatch(name):
            other = "cuda-toolkit" if name.startswith("cuda") and "drivers" not in name else ""
            yield case.error(
                "driver-in-image",
                f"{name} brings libraries of a driver into the image, and the nodes have their own: driver/library "
                f"version mismatch{f'; {other} packages bring none' if other else ''}",
                where,
            )
            return
