"""Choose what an image is made of: torch and its CUDA, one NCCL, Python, the base, EFA, HyperPod's agent. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from packaging.version import Version

from windlass.errors import ExitCode, UserError
from windlass.image.facts.bases import Base, base_of
from windlass.image.facts.node import Node
from windlass.image.facts.table import (
    Build,
    Release,
    accepts,
    assumed_of_driver,
    companion,
    facts,
    host_platform,
    minimum_driver,
    minor,
    package,
    release,
    releases,
    runs,
)
from windlass.image.plan.write import (
    AGENT,
    BUILD_TOOLS,
    CONSTRAINTS,
    OWN,
    REQUIREMENTS,
    Ingredients,
    dockerfile_of,
    files_of,
)
from windlass.image.read.requirements import Place, Wanted, parse_requirements, wanted_of
from windlass.image.state.resolver import Index, Question
from windlass.spec import Run


def lock(plan: ImagePlan, index: Index) -> ImagePlan:
    """The plan with a version for everything that pip installs."""
    of = plan.ingredients
    if of.torch is None:
        raise UserError(
            "the packages of this base image are not known before it is built, so nothing can be pinned against them",
            evidence=of.base.image,
            fix="image.base=null    lets windlass choose one",
        )
    wanted = [f"torch=={of.torch}", *of.companions, *of.compiled, *(BUILD_TOOLS.split() if of.compiled else ())]
    for name in (REQUIREMENTS, OWN):
        wanted += [line for line in plan.files.get(name, "").splitlines() if line and not line.startswith("-")]
    answer = index.resolve(
        Question(
            requirements=tuple(wanted),
            constraints=tuple(plan.files[CONSTRAINTS].splitlines()),
            python=of.python or Question.python,
            platform=of.platform,
            glibc=facts()["systems"].get(of.base.system or "", {}).get("glibc", Question.glibc),
            extra_indexes=(of.index,) if of.index else (),
        )
    )
    if answer.trouble:
        raise UserError(
            "the packages cannot be pinned",
            evidence=answer.trouble[-1500:],
            cause="requirements that contradict each other" if answer.checked else "an index that cannot be asked",
            fix="change one of the requirements above" if answer.checked else "without --lock    nothing is asked",
            exit_code=ExitCode.BAD_INPUT if answer.checked else ExitCode.FAILED,
        )
    pins = sorted((package.name, package.version) for package in answer.packages)
    text = "".join(f"{name}=={version}\n" for name, version in pins)
    partial = [f"the lock is partial: {why}, and what only they name is not pinned" for why in answer.notes]
    partial += [f"the lock is partial: {why}" for why in answer.unknown]
    return replace(plan, files={**plan.files, CONSTRAINTS: text}, warnings=(*plan.warnings, *partial))


OLDEST_TORCH = "2.11"  # what the trainer is tested with
OLDEST_PYTHON = "3.11"


@dataclass(frozen=True)
class Choice:
    """One decision, with its reason and where the facts behind it come from."""

    what: str
    value: str
    why: str
    source: str = ""


@dataclass(frozen=True)
class ImagePlan:
    node: Node
    ingredients: Ingredients
    choices: tuple[Choice, ...]
    dockerfile: str
    files: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "node": asdict(self.node),
            "choices": [asdict(choice) for choice in self.choices],
            "warnings": list(self.warnings),
            "dockerfile": self.dockerfile,
            "files": dict(self.files),
        }


def plan_image(run: Run, node: Node, files: Mapping[str, str] | None = None) -> ImagePlan:
    """The image of a run without a Dockerfile of its own. `files` holds the text of image.requirements."""
    if node.contradiction:
        raise UserError(
            f"there are no such nodes: {node.contradiction}",
            evidence=f"the nodes: {node.describe()}",
            fix="--driver and --gpu as nvidia-smi shows them on a node; --from-cluster reads both from its labels",
        )
    image = run.image
    host = node.gpu and host_platform(node.gpu)
    choices = [
        Choice("platform", node.platform, f"every node with a {node.gpu} is", facts()["gpu_hosts"]["source"])
        if host == node.platform
        else Choice("platform", node.platform, f"the nodes: {node.origin}")
    ]
    own, own_options = _own_requirements(run, files or {})
    asked = [*(wanted_of(text, Place("image.pip", 1)) for text in image.pip), *own]
    sources = {*facts()["builds_against_torch"]["names"]} & {*facts()["only_source"]["names"]}
    compiled = () if node.cpu_only else tuple(wanted.text for wanted in asked if wanted.name in sources)
    base = base_of(image.base) if image.base else None
    build: Build | None = None
    torch: str | None = None
    index: str | None = None
    if base and (base.torch or base.family == "nvidia-torch"):
        choices.append(Choice("torch", base.torch or "the base image's", f"{base.image} brings it: no second one"))
        _check_base(base, run, node)
    elif node.cpu_only:
        newest = _release_asked(image.torch) or releases()[0]
        torch, index = f"{newest.version}+cpu", f"{facts()['torch_index']['url']}cpu"
        choices.append(Choice("torch", torch, "the run trains on CPUs", newest.source))
    else:
        pinned = next((wanted for wanted in asked if wanted.name == "torch" and wanted.pin), None)
        build, why = choose_build(run, node, pinned)
        torch, index = f"{build.torch}+{build.tag}" if build.index else build.torch, build.index
        drivers = {entry["cuda_major"]: entry["source"] for entry in reversed(facts()["drivers"])}
        choices += [
            Choice("torch", torch, why, build.source),
            Choice("CUDA", build.cuda, _why_cuda(build, node), drivers.get(build.cuda_major, "")),
            Choice("NCCL", build.nccl or "as pinned by torch", f"{build.nccl_package}, which the torch wheel requires; "
                   "no second one is installed", build.source),
        ]  # fmt: skip
    known = release(torch) if torch else None
    python, chosen_base, more = _python_and_base(run, node, base, build, known, compiled)
    choices += more
    efa = facts()["efa"] if node.efa else None
    if efa:
        _check_efa(chosen_base)
        choices.append(Choice("EFA", efa["installer"], f"the nodes have EFA ({node.origin})", efa["source"]))
        why = (
            f"comes with the EFA installer; made with NCCL {efa['tested_with_nccl']}, takes {efa['oldest_nccl']} and on"
        )
        choices.append(Choice("NCCL plugin", f"aws-ofi-nccl {efa['ofi_nccl']}", why, efa["source"]))
    agent = package(AGENT) if image.hyperpod_agent else None
    if agent:
        why = f"asked for; it requires torch{agent['requires']['torch']}, so torch is held by a constraint"
        choices.append(Choice("HyperPod agent", agent["version"], why, agent["source"]))
    cuda = build.cuda if build else base.cuda if base else None
    assumed = assumed_of_driver(node.driver, minimum_driver(cuda)) if node.driver and cuda else None
    ingredients = Ingredients(
        platform=node.platform,
        base=chosen_base,
        python=python,
        torch=torch,
        index=index,
        build=build,
        efa=efa["installer"] if efa else None,
        agent=agent["version"] if agent else None,
        compiled=compiled,
        companions=tuple(_companions(torch, asked)) if torch else (),
        pip=tuple(text for text in image.pip if text not in compiled),
        apt=image.apt,
        own=tuple(own),
        own_options=own_options,
    )
    return ImagePlan(
        node=node,
        ingredients=ingredients,
        choices=tuple(choices),
        dockerfile=dockerfile_of(ingredients),
        files=files_of(ingredients),
        warnings=tuple(_warnings(node, build, files or {})),
        assumed=(assumed,) if assumed else (),
    )


def choose_build(run: Run, node: Node, pinned: Wanted | None = None) -> tuple[Build, str]:
    """The newest torch that the nodes can run, and why it is not a newer one; the one that a requirement pins."""
    refused: list[str] = []
    asked = _release_asked(run.image.torch or (pinned.pin if pinned else None))
    local = (pinned.pin or "").partition("+")[2] if pinned and not run.image.torch else ""
    for known in [asked] if asked else releases():
        for build in known.builds:
            reason = why_not(run, node, known, build)
            if local and pinned and reason is None and build.tag != local:
                reason = f"{pinned.place} asks for {local}"
            if reason is None:
                newest = f"the newest that fits; {refused[0]}" if refused else "the newest"
                place = "image.torch" if run.image.torch else pinned and pinned.place
                return build, f"{place} asks for it" if place else newest
            refused.append(f"torch {build.torch} with CUDA {build.cuda}: {reason}")
    raise UserError(
        "no torch in the table runs on these nodes with what is asked for",
        evidence="\n".join(refused[:6]),
        cause=f"the nodes: {node.describe()}",
        fix="a newer driver on the nodes" if "driver" in " ".join(refused) else "image.torch or image.python",
    )


def why_not(run: Run, node: Node, known: Release, build: Build) -> str | None:
    """Why a build is not taken; None where it can be."""
    image = run.image
    if Version(known.version) < Version(OLDEST_TORCH):
        return f"windlass needs torch {OLDEST_TORCH} or newer"
    if image.cuda and image.cuda not in (build.cuda, build.cuda.split(".")[0]):
        return f"image.cuda asks for {image.cuda}"
    if build.status == "experimental" and image.cuda != build.cuda:
        return "an experimental build"
    if node.platform not in build.platforms:
        return f"no CUDA build for {node.platform}"
    if image.python and image.python not in known.python:
        return f"no wheel for Python {image.python}"
    if image.hyperpod_agent and not accepts(package(AGENT)["requires"]["torch"], known.version):
        return f"the HyperPod agent requires torch{package(AGENT)['requires']['torch']}"
    if node.driver and not runs(node.driver, build.minimum_driver):
        return f"needs driver {build.minimum_driver}, the nodes have {node.driver}"
    if node.capability and not build.runs_on(node.capability, node.platform):
        return f"no code for {node.gpu} (compute capability {node.capability})"
    return None


def _release_asked(version: str | None) -> Release | None:
    if version and release(version) is None:
        known = ", ".join(known.version for known in releases()[:8])
        raise UserError(
            f"image.torch={version} is not in the table",
            evidence=f"it has {known}, …",
            fix=f"image.torch={releases()[0].version}",
        )
    return release(version) if version else None


def _why_cuda(build: Build, node: Node) -> str:
    where = "PyPI's own build" if build.index is None else f"from {build.index}"
    driver = f"driver {node.driver} is enough" if node.driver else "the driver of the nodes is not known"
    gpu = f"; it has code for {node.gpu}" if node.capability else ""
    return f"{where}; {driver} (needs {build.minimum_driver}){gpu}"


def _python_and_base(
    run: Run, node: Node, base: Base | None, build: Build | None, known: Release | None, compiled: tuple[str, ...]
) -> tuple[str | None, Base, list[Choice]]:
    image, bases = run.image, facts()["bases"]
    own = bases["ubuntu"]["python"]
    python = image.python or own
    _check_python(python, "image.python is", None if base else known, fix=f"image.python='\"{own}\"'")
    if base:
        if image.python and base.python and base.python != image.python:
            raise UserError(
                f"{base.image} has Python {base.python}, and image.python asks for {image.python}",
                fix="image.python=null    takes that of image.base",
            )
        found = base.python if base.family in ("python", "system", "cuda") else None
        if found is None and base.family in ("system", "cuda"):
            found = facts()["systems"].get(base.system or "", {}).get("python")
        if found:
            _check_python(found, f"{base.image} has", known, fix="image.base=null    lets windlass choose")
        return found, base, [Choice("base image", base.image, "image.base asks for it")]
    if build and compiled:
        tag = bases["cuda_devel"].get(build.cuda)
        if tag is None or python != own:
            raise UserError(f"{compiled[0]} is compiled with nvcc, and no base in the table has CUDA {build.cuda} with "
                            f"Python {python}", fix="image.base=…    names one that has")  # fmt: skip
        chosen = Choice("base image", tag, f"{compiled[0]} is compiled with nvcc {build.cuda}", bases["cuda_source"])
    elif python == own:
        chosen = Choice("base image", bases["ubuntu"]["image"], "torch brings CUDA itself, so the base needs none; "
                        "EFA's NCCL plugin is made for Ubuntu", bases["ubuntu"]["source"])  # fmt: skip
    elif node.efa:
        raise UserError(
            f"EFA's NCCL plugin is made for Ubuntu, whose Python is {own}; image.python asks for {python}",
            fix=f"image.python='\"{own}\"'    or image.efa=false",
        )
    else:
        value = bases["python"]["image"].format(python=python)
        chosen = Choice("base image", value, f"Python {python} is asked for", bases["python"]["source"])
    why = "image.python asks for it" if image.python else f"the one of {chosen.value.split(':')[0]}"
    return python, base_of(chosen.value), [Choice("Python", python, why), chosen]


def _check_python(python: str, which: str, known: Release | None, *, fix: str) -> None:
    if Version(python) < Version(OLDEST_PYTHON):
        raise UserError(f"windlass needs Python {OLDEST_PYTHON} or newer, and {which} {python}", fix=fix)
    if known and python not in known.python:
        wheels = f"{which} {python}; there are wheels for {', '.join(known.python)}"
        raise UserError(f"torch {known.version} has no wheel for Python {python}", evidence=wheels, fix=fix)


def _check_base(base: Base, run: Run, node: Node) -> None:
    if base.torch and Version(minor(base.torch)) < Version(OLDEST_TORCH):
        raise UserError(f"windlass needs torch {OLDEST_TORCH} or newer, and {base.image} brings torch {base.torch}",
                        fix="image.base=null    lets windlass choose, or a newer tag of it")  # fmt: skip
    asked = run.image.torch
    if asked and base.torch and base.torch != asked and not accepts(f"=={asked}.*", base.torch):
        raise UserError(f"image.torch asks for {asked} but {base.image} brings torch {base.torch}",
                        fix="drop one of image.base and image.torch")  # fmt: skip
    if node.driver and base.cuda:
        needed = minimum_driver(base.cuda)
        if not runs(node.driver, needed):
            raise UserError(f"{base.image} has CUDA {base.cuda}, which needs driver {needed}; there is {node.driver}",
                            fix="image.base=null    lets windlass choose")  # fmt: skip


def _check_efa(base: Base) -> None:
    known = facts()["efa"]["distributions"]
    system = (base.system or "").replace("ubuntu", "ubuntu:")
    if base.system and system not in known:
        raise UserError(f"EFA's NCCL plugin is made for {' and '.join(known)}, not for {base.image}",
                        fix="image.base=null    lets windlass choose, or image.efa=false")  # fmt: skip


def _own_requirements(run: Run, files: Mapping[str, str]) -> tuple[list[Wanted], tuple[str, ...]]:
    """What image.requirements asks for, with the files that it names."""
    name = run.image.requirements
    if name is None:
        return [], ()
    if name not in files:
        raise UserError(
            f"there is no file {name}",
            evidence="image.requirements names it",
            fix="image.requirements=FILE    beside the run file",
        )
    parsed = parse_requirements(name, files)
    if parsed.missing:
        other, place = parsed.missing[0]
        raise UserError(
            f"there is no file {other}",
            evidence=f"{place} names it",
            fix=f"{place}: a file beside it, or leave that line out",
        )
    return list(parsed.wanted), tuple(f"{option} {value}".strip() for option, value, _ in parsed.options)


def _warnings(node: Node, build: Build | None, files: Mapping[str, str]) -> Iterator[str]:
    if build and not node.driver:
        yield f"the driver of the nodes is not known: this image needs {build.minimum_driver} or newer (--driver)"
    if build and not node.gpu:
        yield "the GPU of the nodes is not known: name it with --gpu or resources.instance"
    for name, text in files.items():
        if "--hash" in text:
            yield f"the hashes of {name} are not checked: torch is chosen here, and pip wants hashes for all or none"


def _companions(torch: str, asked: list[Wanted]) -> Iterator[str]:
    """The torchvision and torchaudio that go with a torch, where they are asked for."""
    local = torch.partition("+")[2]
    wanted = {wanted.name for wanted in asked if not wanted.constraint}
    for name in ("torchvision", "torchaudio"):
        version = companion(name, torch)
        if version and name in wanted:
            yield f"{name}=={version}+{local}" if local else f"{name}=={version}"
