"""Rules about torch itself against the nodes: GPU, driver, CPU-only builds, and what is built for another torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from windlass.image.facts.table import (
    assumed_of_driver,
    at_or_below,
    driver_cuda,
    facts,
    gpu_in_table,
    minimum_driver,
    release,
    releases,
    runs,
    version_of,
)
from windlass.image.rules.finding import Case, Finding
from windlass.image.rules.repairs import another_build, companion_of_torch
from windlass.image.state.contents import cuda_libraries, torch_libraries
from windlass.image.state.model import Environment, Package
from windlass.image.state.resolver import torch_tag

COMPANIONS = ("torchvision", "torchaudio")


def torch_environments(case: Case) -> Iterator[tuple[Environment, Package]]:
    """The environments of the final image that hold torch."""
    for environment in case.trace.final.environments.values():
        torch = environment.packages.get("torch")
        if torch and torch.version:
            yield environment, torch


def cpu_only(case: Case) -> Iterator[Finding]:
    """A build without CUDA on nodes with GPUs."""
    packages = [environment.packages.get("torch") for environment in case.trace.final.environments.values()]
    for torch in (package for package in packages if package):
        if torch.cuda == "cpu" and case.node.gpu and not case.node.cpu_only:
            reason = (
                "conda sees no GPU while it builds and takes the build for CPUs"
                if torch.origin == "conda"
                else (f"torch {torch.version} on {case.node.platform} is a build for CPUs alone")
            )
            yield case.error(
                "cpu-only-torch", f"{reason}; the nodes have {case.node.gpu}", torch.where, *another_build(case, torch)
            )


def index_tag(case: Case) -> Iterator[Finding]:
    """A build of torch that is asked for by its address, and that no release was published with."""
    known = {build.tag for one in releases() for build in one.builds}
    known |= {tag for tags in facts()["torch_index"]["older_builds"].values() for tag in tags}
    for step in case.trace.steps:
        if step.stage not in case.trace.used_stages or not step.asks("torch"):
            continue
        for url in step.index:
            tag = torch_tag(url) or ""
            alone = step.by_uv or "--index-url" in step.options
            if re.fullmatch(r"cu\d{2,3}", tag) and tag not in known and alone and "nightly" not in url:
                newest = max((one for one in known if one.startswith("cu1")), key=lambda one: int(one[2:]))
                yield case.error(
                    "no-version",
                    f"torch has no builds at {url}: no release is published for {tag}, and {newest} is the newest",
                    step.where,
                )


def gpu_code(case: Case) -> Iterator[Finding]:
    """torch's build has no code for the GPU."""
    capability = case.node.capability
    if case.node.gpu and capability is None:
        case.trace.unknown.append(f"the GPU {case.node.gpu} is not in the table: whether torch has code for it")
    for _, torch in torch_environments(case):
        known = release(torch.public) if torch.version else None
        build = known.build(torch.cuda) if known and torch.cuda and torch.cuda != "cpu" else None
        outside = capability if build is None and torch.cuda not in (None, "cpu") else None
        first, last = _first_cuda(outside or "0"), facts()["nvcc"]["last"].get(outside)
        cuda = Version(torch.cuda) if outside and torch.cuda else Version("0")
        lacks = f"CUDA {last} is the last that has" if last and cuda > Version(last) else ""
        if outside and first and cuda < Version(first) and case.trace.final.base.family != "nvidia-torch":
            lacks = f"CUDA {first} is the first that has"
        if lacks:
            yield case.error(
                "gpu-architecture",
                f"torch {torch.version} is built with CUDA {torch.cuda}, without code "
                f"for {case.node.gpu}, compute capability {capability}: {lacks}",
                torch.where,
                *another_build(case, torch),
            )
        elif capability and build is None and torch.cuda != "cpu":
            case.trace.unknown.append(
                f"{torch.where}: torch {torch.version} with CUDA "
                f"{torch.cuda or 'unknown'} is not in the table: whether it has "
                f"code for {case.node.gpu}"
            )
        if not capability or not build or build.runs_on(capability, case.node.platform):
            continue
        compiled = " ".join(build.architectures(case.node.platform) or ())
        yield case.error(
            "gpu-architecture",
            f"torch {torch.version} (CUDA {build.cuda}) has no code for "
            f"{case.node.gpu}, compute capability {capability}: it is compiled for {compiled}",
            torch.where,
            *another_build(case, torch),
        )


def _first_cuda(capability: str) -> str | None:
    """The first CUDA that compiles for a GPU, or for one of its generation whose code runs on it."""
    own, first = Version(capability), facts()["nvcc"]["first"]
    return min(
        (first[one] for one in first if Version(one).major == own.major and Version(one) <= own),
        key=Version,
        default=None,
    )


def package_on_gpu(case: Case) -> Iterator[Finding]:
    """Packages whose own kernels do not run on the GPU, or have no binary for torch's CUDA."""
    oldest = facts()["oldest_capability"]
    for environment, torch in torch_environments(case):
        for package in environment.packages.values():
            needed = at_or_below(oldest.get(package.name, {}), package.public)
            if case.node.capability and needed and Version(case.node.capability) < Version(needed):
                yield case.error(
                    "package-gpu-architecture",
                    f"{package.name} {package.version} has kernels for "
                    f"compute capability {needed} and newer; {case.node.gpu} has {case.node.capability}",
                    package.where,
                )
        package_ = environment.packages.get("bitsandbytes")
        made = cuda_libraries(case.index, package_.found) if package_ and torch.cuda not in (None, "cpu") else ()
        cuda, whose = torch.cuda or "", f"torch {torch.version}"
        path, base = case.trace.final.variables.get("LD_LIBRARY_PATH", ""), case.trace.final.base
        # Before 0.43 it took the first libcudart of LD_LIBRARY_PATH, whatever torch has.
        if package_ and not package_.at_least("0.43") and "/cuda" in path and base.cuda:
            cuda, whose = base.cuda, f"{base.image}, which LD_LIBRARY_PATH names"
        if package_ and made and cuda.replace(".", "") not in made:
            yield case.error(
                "bitsandbytes-build",
                f"bitsandbytes {package_.version} has binaries for CUDA {', '.join(made)}, "
                f"none for the {cuda} of {whose}",
                package_.where,
            )


def made_for_torch(case: Case) -> Iterator[Finding]:
    """Packages that bring a library for each torch they know: libgraphbolt_pytorch_2.2.1.so."""
    for environment, torch in torch_environments(case):
        for package in environment.packages.values():
            if package.name not in facts()["library_by_torch"]["names"] or not package.version:
                continue
            made = torch_libraries(case.index, package.name, package.public)
            if made and torch.public not in made:
                yield case.error(
                    f"torch-of-{package.name}",
                    f"{package.name} {package.version} has libraries for torch {', '.join(made)}, and the image has "
                    f"torch {torch.version}: it does not load",
                    package.where,
                )


def driver_without_gpu(case: Case) -> Iterator[Finding]:
    """The driver of the nodes does not run their GPU: no image does, so the nodes are not as they are told."""
    if case.node.contradiction:
        yield case.error("driver-without-gpu", f"{case.node.contradiction}; no image changes that", case.base_where())


def driver_too_old(case: Case) -> Iterator[Finding]:
    """The driver does not run programs of torch's CUDA, or NVIDIA's container runtime refuses the base image."""
    driver = case.node.driver
    if not driver or case.node.cpu_only:
        return
    torch_found = False
    for _, torch in torch_environments(case):
        if not torch.cuda or torch.cuda == "cpu":
            continue
        needed = minimum_driver(torch.cuda)
        if not runs(driver, needed):
            torch_found = True
            yield case.error(
                "driver-too-old",
                f"torch {torch.version} is built with CUDA {torch.cuda}, which needs "
                f"driver {needed} or newer; the nodes have {driver}",
                torch.where,
                *another_build(case, torch),
            )
        elif assumed := assumed_of_driver(driver, needed):
            case.trace.assumed.append(assumed)
    base = case.trace.final.base
    native = driver_cuda(driver)
    checked = base.repository.endswith("nvidia/cuda") or (base.family == "torch" and base.has_nvcc)
    if not checked or not base.cuda or base.cuda == "cpu" or not native or torch_found:
        return
    if "NVIDIA_REQUIRE_CUDA" in case.trace.final.exported or "NVIDIA_DISABLE_REQUIRE" in case.trace.final.variables:
        return
    branches = facts()["driver_branches"]
    accepted = branches["accepted"].get(base.cuda)
    geforce = re.fullmatch(branches["geforce"], gpu_in_table(case.node.gpu or "") or "")
    if geforce and Version(base.cuda) >= Version(branches["geforce_since"]):
        accepted = []  # the exceptions are for other brands
    if accepted is None and Version(native) < Version(base.cuda):
        case.trace.unknown.append(
            f"{case.base_where()}: which drivers {base.image} accepts is not in the table; {driver} has CUDA {native}"
        )
    elif accepted is not None and Version(native) < Version(base.cuda) and version_of(driver).major not in accepted:
        yield case.error(
            "base-needs-driver",
            f"{base.image} is refused by NVIDIA's container runtime: it wants a driver with CUDA {base.cuda}"
            f"{', or one of the branches ' if accepted else ''}{', '.join(map(str, accepted))}; {driver} has CUDA "
            f"{native}",
            case.base_where(),
        )


def companion_build(case: Case) -> Iterator[Finding]:
    """torchvision and torchaudio of another release or another build than torch."""
    for environment, torch in torch_environments(case):
        for name in COMPANIONS:
            package = environment.packages.get(name)
            if package is None or not package.version or (package.where == torch.where and package.origin == "base"):
                continue
            # torchaudio's _check_cuda_version compares the minor release too; torchvision's the major alone.
            exact = name == "torchaudio" and package.at_least("2.0") and not package.at_least("2.9")
            gpu = "cpu" not in (torch.cuda, package.cuda)
            if _differ(torch.cuda, package.cuda, minor=exact and gpu):
                refuses = "importing it ends with an error" if exact and gpu else "its operators do not load"
                yield case.error(
                    f"{name}-build",
                    f"{name} {package.version} is built for {_build(package.cuda)}, "
                    f"torch {torch.version} for {_build(torch.cuda)}: {refuses}",
                    package.where,
                    *companion_of_torch(case, package, torch),
                )


def two_nccl(case: Case) -> Iterator[Finding]:
    """One NCCL: the one that torch requires."""
    for environment, torch in torch_environments(case):
        found = [part for name, part in environment.packages.items() if name.startswith("nvidia-nccl-cu")]
        if len(found) > 1 and torch.cuda:
            own = f"nvidia-nccl-cu{torch.cuda.split('.')[0]}"
            other = next((one for one in found if one.name != own), found[-1])
            yield case.error(
                "two-nccl",
                f"{' and '.join(f'{one.name} {one.version}' for one in found)}: two NCCL libraries in one process",
                other.where,
            )


def _differ(one: str | None, other: str | None, *, minor: bool) -> bool:
    if not one or not other:
        return False
    return one != other if minor else one.split(".")[0] != other.split(".")[0]


def _build(cuda: str | None) -> str:
    return "CPUs" if cuda == "cpu" else f"CUDA {cuda}"
