"""Rules about what is compiled in the image: against which torch, with which nvcc, and for which GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from windlass.image.facts.table import facts, minor, removed_modules
from windlass.image.rules.finding import Case, Finding
from windlass.image.rules.repairs import after_torch, apt_install, devel_base, line_before, other_python
from windlass.image.rules.torch import torch_environments
from windlass.image.state.contents import Source, source_in, source_of
from windlass.image.state.model import Compiled, Package

MADE_FOR = re.compile(
    r"cu(?P<cuda>\d+)[-_/]?torch-?(?P<torch>\d+\.\d+)|torch-?(?P<torch2>\d+\.\d+)[\d.]*(?:\+|%2b|[-_/])cu(?P<cuda2>\d+)"
)


def built_here(case: Case) -> Iterator[tuple[Package, Compiled, str]]:
    """Packages that are built from source and need torch for it, with what they need beside it."""
    seen = set()
    for step in case.trace.steps:
        if step.stage not in case.trace.used_stages:
            continue
        for name, package in step.after.items():
            if package.compiled and step.before.get(name) != package and (name, package.where) not in seen:
                seen.add((name, package.where))
                yield package, package.compiled, need_of(case, package) or ""


def need_of(case: Case, package: Package) -> str | None:
    """What building it from source takes: by the table, else by what its source distribution holds."""
    known: str | None = facts()["builds_against_torch"]["names"].get(package.name)
    return known or _source(case, package).needs


def _source(case: Case, package: Package) -> Source:
    if package.local:
        return source_in(case.texts.files, package.local)
    if package.version:
        return source_of(case.index, package.name, package.version)
    return Source(**facts()["repositories"]["sources"].get(package.name, {}))


def torch_while_building(case: Case) -> Iterator[Finding]:
    """setup.py imports torch: it must be there before, and pip must not build in an empty environment."""
    for package, compiled, need in built_here(case):
        if need not in ("nvcc", "c++") and not (need == "torch" and _precompiles(compiled)):
            continue
        if compiled.isolated:
            yield case.error(
                "build-isolation",
                f"{package.name} imports torch while it is built, and pip builds it in an environment without torch",
                package.where,
                *after_torch(case, package),
            )
        elif compiled.torch is None and case.trace.final.base.family is not None:
            yield case.error(
                "build-before-torch",
                f"{package.name} imports torch while it is built, and no earlier step installs torch",
                package.where,
                *after_torch(case, package),
            )


def build_modules(case: Case) -> Iterator[Finding]:
    """Without isolation a build finds only what an earlier step installed."""
    projects = facts()["build_modules"]["projects"]
    for package, compiled, _ in built_here(case):
        source = _source(case, package)
        needed = {projects[name] for name in source.imports if name in projects} | {
            name for name in source.requires if name in projects.values()
        }
        lacking = sorted(needed - compiled.installed.keys() - compiled.seeded)
        if lacking and not compiled.isolated and compiled.bare:
            yield case.error(
                "build-module",
                f"{package.name} is built without isolation and needs "
                f"{', '.join(lacking)}, which no earlier step installs",
                package.where,
            )


def old_source(case: Case) -> Iterator[Finding]:
    """A source that is older than the Python or the setuptools that build it."""
    for package, compiled, _ in built_here(case):
        source, python = _source(case, package), compiled.python or "3"
        if outgrown := _outgrown(case, package, compiled):
            yield case.error(
                "no-wheel",
                f"{package.name} {package.version} has wheels up to Python {outgrown[-1]}, "
                f"and none for {python}, which came after it: its source does not build there",
                package.where,
                *other_python(case, package, python, outgrown[-1]),
            )
        elif removed := [name for name in source.imports if name in removed_modules(python)]:
            yield case.error(
                "build-module",
                f"the setup.py of {package.name} {package.version or ''} imports {removed[0]}, which Python {python} "
                "has no more",
                package.where,
            )
        elif newest := _without_pkg_resources(package, compiled, source):
            yield case.error(
                "build-module",
                f"building {package.name} {package.version or ''} imports pkg_resources, which setuptools has no "
                f"more since 82, and {newest}",
                package.where,
            )


def _without_pkg_resources(package: Package, compiled: Compiled, source: Source) -> str:
    """Why a build that imports pkg_resources does not find it; nothing where it does or does not need it."""
    without = facts()["change_names"]["setuptools_without"]
    if compiled.isolated:
        texts = [text for text in source.written if re.match(r"setuptools\b", text)]
        newest = all(Requirement(text).specifier.contains(without) for text in texts)
        return "pip builds it with the newest" if newest and "pkg_resources" in source.imports else ""
    own = compiled.installed.get("setuptools")
    if own is None or not own.at_least(without):
        return ""
    system = facts()["systems"].get(compiled.system or "", {}).get("wheel")  # apt's, below pip's packages
    by_wheel = "wheel" in source.imports and "wheel" not in compiled.installed and system
    if by_wheel and Version(system) < Version(facts()["change_names"]["wheel_without"]):
        return f"wheel {system} of {compiled.system} imports it; {own.where} installed setuptools {own.version}"
    return f"{own.where} installed setuptools {own.version}" if "pkg_resources" in source.imports else ""


def _outgrown(case: Case, package: Package, compiled: Compiled) -> list[str]:
    """The Pythons that a release has compiled wheels for, where it is older than the Python of the image."""
    came = facts()["python_released"].get(compiled.python or "")
    if not came or not package.version or package.page or package.local:
        return []
    files = case.index.files(package.name, package.version) or []
    uploaded = package.uploaded or min((day for _, day in files), default=came)
    tags = re.findall(r"-cp3(\d+)-cp3\d+m?-manylinux", " ".join(url for url, _ in files)) if uploaded < came else []
    return [f"3.{minor}" for minor in sorted({int(tag) for tag in tags})]


def nvcc(case: Case) -> Iterator[Finding]:
    """nvcc: there, of torch's CUDA, and new enough for the GPU."""
    for package, compiled, need in built_here(case):
        # deepspeed's setup.py asks nvcc for its version wherever it finds torch.
        asks = package.name == "deepspeed" and not compiled.isolated and compiled.torch is not None
        uses = need == "nvcc" or (need == "torch" and (_precompiles(compiled) or asks))
        if not uses or case.node.cpu_only or _skips_cuda(compiled):
            continue
        torch = compiled.torch or case.trace.final.torch
        if compiled.nvcc is None:
            if compiled.nvcc_known:
                yield case.error(
                    "no-nvcc",
                    f"{package.name} is compiled with nvcc, which {case.trace.final.base.image} does not have",
                    package.where,
                    *devel_base(case, package),
                )
            continue
        exact = _same_minor(case, package, compiled)
        part = 2 if exact else 1
        if (
            torch
            and torch.cuda
            and torch.cuda != "cpu"
            and (torch.cuda.split(".")[:part] != compiled.nvcc.split(".")[:part])
        ):
            yield case.error(
                "nvcc-of-torch",
                f"{package.name} is compiled with nvcc {compiled.nvcc} against torch "
                f"{torch.version}, which is built with CUDA {torch.cuda}: "
                f"{package.name if exact else 'the extension builder of torch'} refuses another "
                f"{'minor' if exact else 'major'} version",
                package.where,
                *devel_base(case, package),
            )
        yield from _for_the_gpu(case, package, compiled)
        last = facts()["nvcc"]["last"]
        given_up = [
            one for one in _source(case, package).architectures if Version(compiled.nvcc) > Version(last.get(one, "99"))
        ]
        if given_up:
            yield case.error(
                "nvcc-too-new",
                f"the setup.py of {package.name} compiles for compute capability {given_up[0]}, which nvcc "
                f"{compiled.nvcc} no longer knows: unsupported gpu architecture",
                package.where,
            )
        forced = any(
            name.endswith("_FORCE_BUILD") and value.upper() == "TRUE" for name, value in compiled.variables.items()
        )
        newest = facts()["nvcc"]["gcc"].get(minor(compiled.nvcc))
        told = "ccbin" in str(compiled.variables) or "allow-unsupported" in str(compiled.variables)
        if newest and int(compiled.gcc or 0) > newest and not told and (forced or not _source(case, package).fetches):
            yield case.error(
                "gcc-too-new",
                f"{package.name} is compiled with nvcc {compiled.nvcc}, which takes gcc "
                f"up to {newest}, and gcc {compiled.gcc} is the compiler here: unsupported GNU version",
                package.where,
            )


def _for_the_gpu(case: Case, package: Package, compiled: Compiled) -> Iterator[Finding]:
    capability, known = case.node.capability, facts()["nvcc"]
    if not capability or compiled.nvcc is None:
        return
    first, last = known["first"].get(capability), known["last"].get(capability)
    listed = "TORCH_CUDA_ARCH_LIST" in compiled.variables  # which may name an older GPU whose code runs there
    if first and Version(compiled.nvcc) < Version(first) and not listed:
        yield case.error(
            "nvcc-too-old",
            f"nvcc {compiled.nvcc} cannot compile {package.name} for {case.node.gpu} "
            f"(compute capability {capability}): CUDA {first} is the first that can",
            package.where,
        )
    if last and Version(compiled.nvcc) > Version(last):
        yield case.error(
            "nvcc-too-new",
            f"nvcc {compiled.nvcc} no longer compiles {package.name} for {case.node.gpu} "
            f"(compute capability {capability})",
            package.where,
        )


def architecture_list(case: Case) -> Iterator[Finding]:
    """TORCH_CUDA_ARCH_LIST without the GPU of the nodes."""
    capability = case.node.capability
    for package, compiled, _ in built_here(case):
        text = compiled.variables.get("TORCH_CUDA_ARCH_LIST", "")
        torch = compiled.torch if not compiled.isolated and compiled.nvcc else None
        given = _asked_for(case, "TORCH_CUDA_ARCH_LIST")
        if not text and not given and torch and torch.cuda != "cpu" and _detects(case, package, compiled):
            yield case.error(
                "architecture-list",
                f"{package.name} is compiled for the GPUs that torch sees, and a build sees none: list index out of "
                "range; TORCH_CUDA_ARCH_LIST names them",
                package.where,
                *([line_before(package.where, f"ENV TORCH_CUDA_ARCH_LIST={capability}")] if capability else []),
            )
        listed = re.findall(r"(\d+\.\d)(a?)(\+PTX)?", text)
        own = package.name in facts()["own_flags"]["names"] or _source(case, package).own_flags
        if not capability or not listed or own:
            continue
        major, node = int(capability.split(".")[0]), Version(capability)
        covered = any(
            (Version(one).major == major and Version(one) <= node) or (ptx and Version(one) <= node)
            for one, _, ptx in listed
        )
        if not covered:
            where = case.trace.final.exported.get("TORCH_CUDA_ARCH_LIST", package.where)
            yield case.error(
                "architecture-list",
                f"{package.name} is compiled for {text}, which has no code for "
                f"{case.node.gpu} (compute capability {capability})",
                where,
            )
            return


def cuda_home(case: Case) -> Iterator[Finding]:
    """CUDA_HOME of a toolkit that is not there, where something is compiled with it."""
    for package, compiled, need in built_here(case):
        uses = need == "nvcc" or (need == "torch" and _precompiles(compiled))
        named = re.fullmatch(r"/usr/local/cuda-(\d+\.\d+)/?", compiled.variables.get("CUDA_HOME", ""))
        if not (uses and named and compiled.nvcc and compiled.nvcc_known) or compiled.isolated:
            continue
        if named[1] != minor(compiled.nvcc):
            yield case.error(
                "nvcc-of-cuda-home",
                f"{package.name} is compiled with the nvcc of CUDA_HOME, {named[0]}, which is not there: the image has "
                f"CUDA {compiled.nvcc}",
                case.trace.final.exported.get("CUDA_HOME", package.where),
            )
            return


def gpu_while_building(case: Case) -> Iterator[Finding]:
    """Sources that compile for GPUs only where they see one, which no build does, or where a variable asks for it."""
    for package, compiled, _ in built_here(case):
        looks, names, refuses = _looks(case, package)
        told = any(compiled.variables.get(name) or _asked_for(case, name) for name in names)
        told = told or "force_cuda" in compiled.command.lower()
        torch = compiled.torch if not compiled.isolated else None
        if not looks or told or not torch or torch.cuda == "cpu" or case.node.cpu_only or not case.node.gpu:
            continue
        ends = "its setup.py ends with an error" if refuses else "it is compiled for CPUs alone, and fails on a GPU"
        value = "1" if names and names[0].startswith("FORCE") else (case.node.capability or "9.0").replace(".", "")
        asks = f"; {names[0]}={value} takes its place, as a variable of the command or by ENV" if names else ""
        yield case.error(
            "no-gpu-in-build",
            f"{package.name} compiles its CUDA code where it sees a GPU, and a build sees none: {ends}{asks}",
            package.where,
            *([line_before(package.where, f"ENV {names[0]}={value}")] if names else []),
        )


def _asked_for(case: Case, name: str) -> bool:
    """Whether an ARG without a value leaves it to --build-arg."""
    return bool(re.search(rf"(?mi)^\s*ARG\s+(\w+\s+)*{name}\s*$", case.texts.dockerfile or ""))


def _looks(case: Case, package: Package) -> tuple[bool, tuple[str, ...], bool]:
    """Whether a build looks for a GPU, the variables that take its place, and whether it refuses without."""
    if name := facts()["gpu_while_building"]["forced_by"].get(package.name):
        return True, (name,), False
    source = _source(case, package)
    return source.looks, source.forced_by, source.refuses


def _detects(case: Case, package: Package, compiled: Compiled) -> bool:
    """Whether CUDA code is compiled, and for which GPUs is left to torch, which looks at those of the machine."""
    looks, names, _ = _looks(case, package)
    forced = any(compiled.variables.get(name) == "1" for name in names if name.startswith("FORCE"))
    known = package.name in facts()["gpu_while_building"]["left_to_torch"]
    return (known or _source(case, package).detects) and (forced or not looks)


def compiler(case: Case) -> Iterator[Finding]:
    """A package that is compiled where there is no C compiler."""
    for package, compiled, need in built_here(case):
        if _outgrown(case, package, compiled):
            continue
        lacks = compiled.programs is not None and not compiled.programs & {"gcc", "g++"}
        yield from _cmake(case, package, compiled)
        if need == "rust" and compiled.programs is not None and "cargo" not in compiled.programs:
            yield case.error(
                "no-compiler",
                f"{package.name} {package.version} has no wheel for this image and is "
                "compiled with Rust, which nothing installs before",
                package.where,
            )
        if need in ("nvcc", "c++", "compiler") and not compiled.headers and not _source(case, package).fetches:
            yield case.error(
                "missing-header",
                f"{package.name} is compiled, and Python.h is not there: nothing "
                "installs the headers of the system's Python before",
                package.where,
                *apt_install(case, package.where, "python3-dev"),
            )
        if lacks and need in ("nvcc", "c++", "compiler"):
            yield case.error(
                "no-compiler",
                f"{package.name} is compiled, and nothing installs a C++ compiler before",
                package.where,
                *apt_install(case, package.where, "build-essential"),
            )


def _cmake(case: Case, package: Package, compiled: Compiled) -> Iterator[Finding]:
    """cmake: there where setup.py calls it, and not one that has given up the project's oldest rules."""
    source, own = _source(case, package), compiled.installed.get("cmake")
    there = compiled.programs is None or "cmake" in compiled.programs or own is not None
    if source.calls_cmake and not there:
        yield case.error(
            "missing-program",
            f"the setup.py of {package.name} {package.version} calls cmake, which nothing installs before",
            package.where,
            *apt_install(case, package.where, "cmake"),
        )
    known = facts()["cmake"]
    asked = [Requirement(text).specifier for text in source.written if re.match(r"cmake\b", text)]
    newest = compiled.isolated and bool(asked) and all(one.contains(known["since"]) for one in asked)
    newest = newest or (not asked and own is not None and own.at_least(known["since"]))
    old = source.cmake_minimum and Version(source.cmake_minimum) < Version(known["oldest"])
    if newest and old and "CMAKE_POLICY_VERSION_MINIMUM" not in compiled.variables:
        yield case.error(
            "build-module",
            f"{package.name} {package.version} is built by rules of cmake {source.cmake_minimum}, which cmake "
            f"{own.version if own and not asked else known['since']} refuses; CMAKE_POLICY_VERSION_MINIMUM="
            f"{known['oldest']} allows them",
            package.where,
            line_before(package.where, f"ENV CMAKE_POLICY_VERSION_MINIMUM={known['oldest']}"),
        )


def other_torch(case: Case) -> Iterator[Finding]:
    """Compiled against one torch, and another one is there in the end; or a ready wheel for another torch."""
    for environment, torch in torch_environments(case):
        for package in environment.packages.values():
            built = package.compiled and need_of(case, package) in ("nvcc", "c++", "torch")
            before = package.compiled.torch if package.compiled and built else None
            if before and before.version and torch.version and before.version != torch.version:
                yield case.error(
                    "compiled-for-another-torch",
                    f"{package.name} is compiled against torch "
                    f"{before.version}, and the image ends with torch {torch.version}",
                    torch.where,
                )
            yield from _made_for(case, package, torch)
            if (
                package.name == "flash-attn"
                and package.compiled
                and before
                and re.search(r"\d(a|b|rc)\d", before.public)
            ) and package.compiled.variables.get("FLASH_ATTENTION_FORCE_BUILD", "").upper() != "TRUE":
                yield case.error(
                    "flash-attn-prebuilt",
                    "flash-attn fetches its ready wheel for torch "
                    f"{minor(before.public)}, which does not fit the base image's own torch "
                    f"{before.version}: undefined symbols; FLASH_ATTENTION_FORCE_BUILD=TRUE compiles it",
                    package.where,
                )


def _made_for(case: Case, package: Package, torch: Package) -> Iterator[Finding]:
    """A ready wheel, or the page it is from, may name the torch, the CUDA and the C++ ABI that it is made for."""
    address = f"{package.page or ''} {package.wheel or ''}".lower()
    named = MADE_FOR.search(address)
    if not named:
        return
    cuda, made = named["cuda"] or named["cuda2"], named["torch"] or named["torch2"]
    problems = []
    if minor(made) != minor(torch.public):
        problems.append(f"torch {made}, not {torch.version}")
    if torch.cuda and torch.cuda != "cpu" and cuda[:2] != torch.cuda.split(".")[0]:
        problems.append(f"CUDA {cuda[:2]}, not {torch.cuda}")
    abi = re.search("cxx11abi(true|false)", address)
    new_abi = torch.at_least(facts()["flash_attention"]["cxx11abi_since"])
    if abi and (abi[1] == "true") != new_abi and torch.origin == "pip":
        problems.append(f"the {'new' if abi[1] == 'true' else 'old'} C++ ABI, not torch's")
    if problems:
        yield case.error(
            f"{package.name}-abi",
            f"this {package.name} wheel is made for {'; '.join(problems)}: importing it ends with an undefined symbol",
            package.where,
            *after_torch(case, package),
        )


def _same_minor(case: Case, package: Package, compiled: Compiled) -> bool:
    """Whether the build refuses an nvcc of another minor release; people who know patch that check away."""
    option = facts()["nvcc"]["exact_minor"].get(package.name)
    asked = [compiled.command, *(name for name, value in compiled.variables.items() if value == "1")]
    patched = "bare_metal" in (case.texts.dockerfile or "")
    return bool(option) and not patched and any(option in text.lower() for text in asked)


def _precompiles(compiled: Compiled) -> bool:
    """deepspeed compiles its operators at installation only where it is told to."""
    return any(name.startswith("DS_BUILD_") and value in ("1", "true") for name, value in compiled.variables.items())


def _skips_cuda(compiled: Compiled) -> bool:
    return compiled.variables.get("FLASH_ATTENTION_SKIP_CUDA_BUILD", "").upper() == "TRUE"
