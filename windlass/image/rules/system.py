"""Rules about the system around Python: programs, libraries, copied environments, EFA, search paths, platforms."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from packaging.version import Version

from windlass.image.facts.bases import no_such_image
from windlass.image.facts.table import at_or_below, driver_cuda, facts, gpu_in_table
from windlass.image.read.installs import PYTHON
from windlass.image.read.texts import Texts, insert_after
from windlass.image.rules.finding import Case, Finding, Repair
from windlass.image.rules.repairs import apt_install, line_before, replace_in_instruction
from windlass.image.state.environments import version_in
from windlass.image.state.machine import lacks_python
from windlass.image.state.model import SYSTEM, Package, State, Where

CUPY = re.compile(r"cupy-cuda(\d+)x")


def failing(case: Case) -> Iterator[Finding]:
    """What the walk found that cannot succeed, each once."""
    for failure in {(failure.id, failure.sentence): failure for failure in reversed(case.trace.failures)}.values():
        where = failure.where
        kind, *values = failure.fix or ("",)
        repairs: tuple[Repair, ...] = ()
        if kind == "apt":
            repairs = apt_install(case, where, *values)
        elif kind == "replace":
            repairs = (replace_in_instruction(where, *values),)
        elif kind == "before":
            repairs = (line_before(where, *values),)
        yield case.error(failure.id, failure.sentence, where, *repairs)


def empty_argument(case: Case) -> Iterator[Finding]:
    """An ARG before FROM has a value for FROM alone."""
    for name, where in case.trace.empty.items():
        declare = partial(_declared, name=name, line=where.first)
        yield case.error(
            "empty-argument",
            f"{name} is empty here: its ARG stands before FROM, and this stage does not declare it again",
            where,
            Repair(f"declare {name} in the stage", declare),
        )


def _declared(texts: Texts, *, name: str, line: int) -> Texts:
    return texts.with_dockerfile(insert_after(texts.dockerfile or "", line - 1, f"ARG {name}"))


def system_library(case: Case) -> Iterator[Finding]:
    """A wheel that loads a library of the system, which no step installs."""
    final, table = case.trace.final, facts()["system_libraries"]
    full = final.base.family == "python" and final.base.has_compiler  # with what buildpack-deps brings
    if final.base.family not in ("cuda", "system", "torch", "python") or "amazonaws" in final.base.image:
        return
    installed = final.brought | ({"build-essential", "libgomp1"} if final.base.has_compiler else set())
    pairs = ((name, known, library) for name, known in table["packages"].items() for library in known["libraries"])
    for name, known, library in pairs:
        brought_by = table["libraries"][library]
        for environment in final.environments.values():
            package = environment.packages.get(name)
            if package is None or not _loads(package, known) or installed & set(brought_by):
                continue
            if full and library not in table["full_images_lack"]:
                continue
            if (
                final.unread
                or final.other_archives
                or (final.base.family == "torch" and library not in table["torch_images"])
            ):
                case.trace.unknown.append(f"{package.where}: whether the image has {library}, which {name} loads")
                continue
            yield case.error(
                "missing-library",
                f"{name} {package.version} loads {library}, which nothing installs (Debian's {brought_by[0]})",
                package.where,
                *apt_install(case, package.where, brought_by[0]),
            )


def _loads(package: Package, known: Mapping[str, Any]) -> bool:
    if known.get("source") and not package.compiled:
        return False
    if known.get("any") and (package.wheel or "").endswith("-any.whl"):
        return True  # a wheel for this machine would have it inside
    return package.at_least(known.get("since", "0")) and not package.at_least(known.get("before", "9999"))


def managed_python(case: Case) -> Iterator[Finding]:
    """Newer systems refuse pip in their own Python (PEP 668); uv wants an environment, or --system."""
    for step in case.trace.steps:
        if step.kind != "pip" or step.environment.prefix != SYSTEM or step.stage not in case.trace.used_stages:
            continue
        state = case.trace.states[step.stage]
        allowed = "--break-system-packages" in step.options or "--target" in step.options or "--prefix" in step.options
        variables = state.variables
        if step.by_uv:
            told = "--system" in step.options or "--python" in step.options or variables.get("UV_SYSTEM_PYTHON")
            if (
                not told
                and not allowed
                and "poetry" not in step.text
                and state.base.family in ("python", "cuda", "system")
            ):
                yield case.error(
                    "uv-without-environment",
                    "uv pip install finds no virtual environment here and "
                    "refuses; --system installs into the image's Python",
                    step.where,
                    line_before(step.where, "ENV UV_SYSTEM_PYTHON=1"),
                )
                return
            allowed = allowed or bool(variables.get("UV_BREAK_SYSTEM_PACKAGES"))
        allowed = allowed or bool(variables.get("PIP_BREAK_SYSTEM_PACKAGES"))
        if step.environment.managed and not allowed:
            yield case.error(
                "externally-managed",
                f"pip refuses to install into the Python of {state.system}: externally-managed-environment (PEP 668)",
                step.where,
                line_before(step.where, "ENV PIP_BREAK_SYSTEM_PACKAGES=1 UV_BREAK_SYSTEM_PACKAGES=1"),
            )
            return


def copied_environment(case: Case) -> Iterator[Finding]:
    """A virtual environment that was copied without the interpreter it links to, or beside another Python."""
    for environment, state, where in case.trace.copied:
        system = state.environments[SYSTEM]
        if environment.prefix == SYSTEM:
            if environment.python and system.python and environment.python != system.python:
                yield case.error(
                    "copied-environment",
                    f"the packages are of Python {environment.python}, and this "
                    f"stage has Python {system.python}: it never sees them",
                    where,
                )
        elif environment.interpreter not in case.trace.states[-1].interpreters | state.interpreters:
            yield case.error(
                "copied-environment",
                f"the environment links to {environment.interpreter} of the other "
                "stage, which is not in this one: no such file or directory",
                where,
            )


def start(case: Case) -> Iterator[Finding]:
    """The command that the image starts finds its Python, and that one has torch."""
    final = case.trace.final
    command = next(iter(final.started.get("ENTRYPOINT") or final.started.get("CMD") or ()), None)
    if command is None or not PYTHON.match(command.program) or final.base.family not in ("python", "cuda", "system"):
        return
    where = case.where_of(command.place.line)
    if command.words[0] == "python" and lacks_python(final):
        yield case.error("missing-program", f"python is started here, and {final.base.image} has python3 alone", where)
        return
    folder = posixpath.dirname(posixpath.dirname(command.words[0]))
    version = version_in(command.program) or final.links.get(command.program)
    other = f"python{version}" if version and version != final.environments[SYSTEM].python else SYSTEM
    prefix = folder if folder in final.environments else other if final.active == SYSTEM else final.active
    own = final.environments[prefix].packages if prefix in final.environments else {}
    torch = next((package for _, package in final.everywhere if package.name == "torch"), None)
    if torch and "torch" not in own and final.active in (SYSTEM, prefix):
        yield case.error(
            "another-python",
            f"{where.place} starts {command.words[0]}, which is not the Python that "
            f"{torch.where} installs torch into: no module named torch",
            where,
        )


def permission(case: Case) -> Iterator[Finding]:
    """An environment that root made, and a later USER installs into."""
    for step in case.trace.steps:
        user = step.user.split(":")[0]
        own = step.environment.prefix != SYSTEM and step.environment.owner in ("root", "0")
        if step.kind == "pip" and user not in ("root", "0", "") and own:
            yield case.error(
                "permission",
                f"{step.environment.prefix} belongs to root, and this step runs as {user}: permission denied",
                step.where,
            )
            return


def efa(case: Case) -> Iterator[Finding]:
    """EFA: its installer new enough, its libraries found by the loader; and there at all where the nodes have it."""
    final, known = case.trace.final, facts()["efa"]
    if (
        final.efa
        and final.efa_where
        and final.efa != "latest"
        and Version(final.efa) < Version(known["floor_for_nccl_2_19"])
    ):
        nccl = final.packages.get("nvidia-nccl-cu12") or final.packages.get("nvidia-nccl-cu13")
        if nccl and nccl.at_least("2.19"):
            yield case.error(
                "efa-too-old",
                f"EFA installer {final.efa} with NCCL {nccl.version}: unable to register "
                f"memory; {known['floor_for_nccl_2_19']} is the oldest that works",
                final.efa_where,
                replace_in_instruction(final.efa_where, final.efa, known["installer"]),
            )
    if final.efa_copied and final.efa_where and not set(known["loads"]) & set(final.apt):
        yield case.error(
            "efa-not-found",
            f"EFA is copied from another stage, and {known['loads'][0]}, which its NCCL "
            "plugin loads, is not installed here: NCCL falls back to TCP",
            final.efa_where,
            *apt_install(case, final.efa_where, known["loads"][0]),
        )
    if final.ofi and final.efa and final.efa != "latest":
        brought, needed = at_or_below(known["libfabric"], final.efa), at_or_below(known["ofi_needs"], final.ofi[0])
        if brought and needed and Version(brought) < Version(needed):
            yield case.error(
                "efa-libfabric",
                f"aws-ofi-nccl {final.ofi[0]} needs libfabric {needed} or newer, and "
                f"EFA installer {final.efa} brings {brought}",
                final.ofi[1],
            )
    if final.ofi_prefix and not _is_on_a_path(case, final.ofi_prefix[0]):
        yield case.error(
            "efa-not-found",
            f"aws-ofi-nccl is installed to {final.ofi_prefix[0]}, where the loader does not look: NCCL falls back to "
            "TCP; LD_LIBRARY_PATH or /etc/ld.so.conf.d names its lib folder",
            final.ofi_prefix[1],
        )
    path = final.variables.get("LD_LIBRARY_PATH")
    if final.efa and path is not None and "LD_LIBRARY_PATH" in final.exported:
        where = final.exported["LD_LIBRARY_PATH"]
        after = final.efa_where is None or where.place.line > final.efa_where.place.line
        if after and "amazon" not in path and "$LD_LIBRARY_PATH" not in path and "efa" not in path:
            yield case.error(
                "efa-not-found",
                "LD_LIBRARY_PATH leaves out EFA's libraries and its NCCL plugin "
                "(/opt/amazon/…): NCCL falls back to TCP",
                where,
            )
    lacks = final.base.family in ("cuda", "torch", "python", "system") and "amazonaws" not in final.base.image
    if case.node.efa and not final.efa and not final.base.efa and final.torch and lacks:
        yield case.remark(
            "no-efa",
            f"the nodes have EFA ({case.node.origin}), and nothing installs its NCCL plugin: NCCL falls back to TCP",
            case.base_where(),
        )


def _is_on_a_path(case: Case, prefix: str) -> bool:
    """Whether the loader finds the libraries of a folder: by itself, by a variable, or by ldconfig."""
    if prefix in ("/usr", "/usr/local"):
        return True
    variables = ("LD_LIBRARY_PATH", "NCCL_NET_PLUGIN", "LD_PRELOAD")
    told = [case.trace.final.variables.get(name, "") for name in variables]
    runs = [instruction.text for instruction in case.dockerfile.instructions if instruction.keyword == "RUN"]
    told += [text for text in runs if re.search(r"ldconfig|ld\.so\.conf", text)]
    return any(f"{prefix}/" in text for text in told)


def library_path(case: Case) -> Iterator[Finding]:
    """LD_LIBRARY_PATH and LD_PRELOAD that put other libraries before torch's own."""
    final = case.trace.final
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        value, where = final.variables.get(name, ""), final.exported.get(name)
        if where is None:
            continue
        if compat := re.search(r"cuda(?:-(\d+\.\d+))?[^:\s]*/compat", value):
            yield from _compat(case, compat[1] or final.base.cuda, where)
        older = re.search(r"/cuda(?:-(\d+\.\d+))?/(?:targets/|lib64|lib\b)", value)
        cuda, torch = (older[1] or final.base.cuda) if older else None, final.torch
        libraries = final.base.has_nvcc or "runtime" in (final.base.tag or "")
        if cuda and torch and torch.origin == "pip" and torch.cuda not in (None, "cpu") and libraries:
            same_major = Version(cuda).major == Version(torch.cuda or "0").major == 12
            if same_major and Version(cuda) < Version(torch.cuda or "0"):
                yield case.error(
                    "library-path",
                    f"LD_LIBRARY_PATH puts CUDA {cuda} before the libraries that torch "
                    f"{torch.version} brings for CUDA {torch.cuda}: libcusparse finds the older "
                    "libnvJitLink, undefined symbol",
                    where,
                )
        if name == "LD_PRELOAD" and "libnccl.so" in value and final.torch:
            yield case.error(
                "nccl-preloaded", "LD_PRELOAD puts another NCCL under torch than the one it is built with", where
            )


def variables(case: Case) -> Iterator[Finding]:
    """What ENV sets and every process of the image then sees: GPUs that are hidden, and paths that lead elsewhere."""
    final = case.trace.final

    def wrong(name: str) -> str | None:
        value = final.variables.get(name, "")
        if name == "NVIDIA_DRIVER_CAPABILITIES" and value and not {"compute", "all"} & set(value.split(",")):
            return f"without compute the container gets no libcuda: {value}"
        if name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES") and value in ("", "-1", "none", "void"):
            return "it hides every GPU"
        if name == "PATH" and not re.search(r"\$\{?PATH|(^|:)(/usr)?/bin(:|$)", value):
            return f"it leaves out /usr/bin, and no command is found: {value}"
        if name == "LD_LIBRARY_PATH" and "/stubs" in value:
            return "the stub of libcuda is found before the driver's: CUDA driver is a stub library"
        python = final.environment.python
        others = [
            path
            for path in value.split(":")
            if (found := re.search(r"/python(3\.\d+)/", f"{path}/")) and found[1] != python
        ]
        return (
            f"{others[0]} holds packages of another Python than {python}"
            if (name == "PYTHONPATH" and python and others)
            else None
        )

    for name, where in final.exported.items():
        gpus = "VISIBLE" in name or "CAPABILITIES" in name
        if not (gpus and case.node.cpu_only) and (reason := wrong(name)):
            yield case.error("environment", f"{name}: {reason}", where)


def _compat(case: Case, compat: str | None, where: Where) -> Iterator[Finding]:
    """Compatibility libraries carry an older driver of a datacenter GPU; in front of a newer one they break it."""
    native = driver_cuda(case.node.driver) if case.node.driver else None
    geforce = re.fullmatch(facts()["driver_branches"]["geforce"], gpu_in_table(case.node.gpu or "") or "")
    if compat and native and Version(native) <= Version(compat) and not geforce:
        return
    yield case.error(
        "cuda-compat",
        "CUDA's compatibility libraries hide the driver's own: error 804 on this GPU"
        if geforce
        else "CUDA's compatibility libraries hide the driver's own: error 803 where the driver is newer",
        where,
    )


def platform(case: Case) -> Iterator[Finding]:
    """A base image that is not there, or is for another machine than the nodes."""
    for stage in (stage for stage in case.dockerfile.stages if stage.number in case.trace.used_stages):
        own = case.trace.states[stage.number].base
        if stage.parent is None and (reason := no_such_image(own)):
            yield case.error("no-such-image", f"{own.image} is not in the registry: {reason}", case.base_where(stage))
    base = case.trace.final.base
    if base.platforms and case.node.platform not in base.platforms:
        yield case.error(
            "base-platform",
            f"{base.repository} is published for {' and '.join(base.platforms)} alone, "
            f"and the nodes are {case.node.platform}: no matching manifest",
            case.base_where(),
        )
    for stage in case.stages():
        if stage.platform and stage.platform.startswith("linux/") and stage.platform != case.node.platform:
            where = case.base_where(stage)
            yield case.error(
                "platform",
                f"the image is made for {stage.platform}, and the nodes are {case.node.platform}: exec format error",
                where,
                replace_in_instruction(where, f"--platform={stage.platform}", f"--platform={case.node.platform}"),
            )


def cuda_packages(case: Case) -> Iterator[Finding]:
    """Packages whose wheel wants a CUDA or cuDNN that neither torch nor the base image brings."""
    final = case.trace.final
    brought = {
        cuda.split(".")[0]
        for cuda in (
            final.base.cuda,
            final.torch.cuda if final.torch else None,
            *(package.public for name, package in final.packages.items() if name.startswith("nvidia-cuda-runtime")),
        )
        if cuda and cuda != "cpu"
    }
    for name, package in final.packages.items():
        if not (CUPY.fullmatch(name) or name in facts()["cuda_packages"]["packages"]) or not package.version:
            continue
        wanted = cuda_wanted(name, package.public, case.index.requires(package.found))
        if wanted is None:
            case.trace.unknown.append(f"{package.where}: which CUDA {name} {package.version} loads is not known")
            continue
        cuda, cudnn = wanted
        if brought and cuda not in brought:
            yield case.error(
                "cuda-of-package",
                f"{name} {package.version} is built for CUDA {cuda}, and the image "
                f"has CUDA {' and '.join(sorted(brought))}",
                package.where,
            )
        elif cudnn and final.base.cudnn is not None and cudnn not in _cudnn(final):
            has = " and ".join(sorted(_cudnn(final)))
            yield case.error(
                "cuda-of-package",
                f"{name} {package.version} loads libcudnn.so.{cudnn}, and the image "
                f"has {f'cuDNN {has}' if has else 'no cuDNN'}",
                package.where,
            )


def cuda_wanted(name: str, version: str, requires: Iterable[str]) -> tuple[str, str | None] | None:
    """The major versions of CUDA and cuDNN that a wheel loads: by its name, its extras or the table."""
    if named := CUPY.fullmatch(name):
        return named[1], None
    extras = " ".join(requires)
    if runtime := re.search(r"nvidia-cuda-runtime(?:-cu\d+)?~=(\d+)", extras):
        cudnn = re.search(r"nvidia-cudnn-cu\d+~=(\d+)", extras)
        return runtime[1], cudnn[1] if cudnn else None
    rows = facts()["cuda_packages"]["packages"][name]
    row: dict[str, Any] = next((row for row in rows if Version(version) >= Version(row["since"])), {})
    return (row["cuda"], row.get("cudnn")) if row.get("cuda") else None


def _cudnn(state: State) -> set[str]:
    """The major versions of cuDNN that the base image, its packages and wheels bring."""
    wheels = [package.public for name, package in state.packages.items() if name.startswith("nvidia-cudnn-cu")]
    apt = [found[1] for name in state.apt if (found := re.match(r"libcudnn(\d)|cudnn(\d)?", name)) and found[1]]
    return {version.split(".")[0] for version in (state.base.cudnn or "", *wheels, *apt) if version}
