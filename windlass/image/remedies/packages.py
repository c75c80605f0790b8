"""Remedies for Python packages: requirements that contradict each other, or that nothing satisfies. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from windlass.image.edits import with_base
from windlass.image.read.texts import Fix, lines_of, replace_lines
from windlass.image.recipe import CUDA_INDEX, rewrite
from windlass.image.remedies.case import Case
from windlass.image.remedies.network import is_network
from windlass.image.read.requirements import Wanted
from windlass.image.facts.table import companion, release, releases

OTHER_NAMES = {
    "pytorch": "torch",
    "sklearn": "scikit-learn",
    "cv2": "opencv-python-headless",
    "pil": "pillow",
    "yaml": "pyyaml",
    "bs4": "beautifulsoup4",
    "huggingface": "huggingface-hub",
    "flash-attention": "flash-attn",
    "flash-attn-2": "flash-attn",
    "tensorboardx": "tensorboard",
}
WELL_KNOWN = (
    *(
        "torch",
        "torchvision",
        "torchaudio",
        "transformers",
        "datasets",
        "tokenizers",
        "accelerate",
        "safetensors",
        "peft",
    ),
    *("numpy", "pandas", "scipy", "scikit-learn", "pyarrow", "matplotlib", "pillow", "requests", "tqdm", "pyyaml"),
    *("deepspeed", "flash-attn", "xformers", "bitsandbytes", "triton", "einops", "sentencepiece", "protobuf", "trl"),
    *("wandb", "tensorboard", "mlflow", "boto3", "fsspec", "s3fs", "aiohttp", "hydra-core", "omegaconf", "evaluate"),
    *(
        "huggingface-hub",
        "hyperpod-elastic-agent",
        "lightning",
        "torchmetrics",
        "torchdata",
        "torchtitan",
        "liger-kernel",
    ),
    *("setuptools", "packaging", "wheel", "ninja", "pydantic", "click", "rich", "psutil", "opencv-python-headless"),
)


@dataclass(frozen=True)
class Demand:
    """`package version depends on name specifier`, as pip and uv write it."""

    package: str
    version: str | None
    name: str
    specifier: str
    line: str


def demands(case: Case) -> Iterator[Demand]:
    """What the log of a resolver says that packages require."""
    pip = case.log.all(r"^\s*([\w.\[\]-]+) (\d\S*) depends on ([\w.-]+)(?:\[[^\]]*\])?\s*(.*?)\s*(?:;.*)?$")
    for one in pip:
        specifier = re.sub(r"\s+and\s+", ",", one.match[4])
        yield Demand(_name(one.match[1]), one.match[2], _name(one.match[3]), specifier, one.line)
    for one in case.log.all(r"([\w.-]+) (\d\S*) has requirement ([\w.-]+?)([=<>!~][^;]*?)(?:;.*)?, but you have"):
        yield Demand(_name(one.match[1]), one.match[2], _name(one.match[3]), one.match[4], one.line)
    text = " ".join(line.strip() for line in case.log.tail)  # uv breaks its sentences over lines
    package, bound = r"([A-Za-z0-9][\w.-]*?)(?:\[[^\]]*\])?", r"(?:[=<>!~]=?=?[\w.*+!]+,?)+"
    for match in re.finditer(rf"{package}({bound})? depends? on {package}({bound})", text):
        exact = re.fullmatch(r"==([\w.+!]+)", match[2] or "")
        line = match[0].strip()
        yield Demand(_name(match[1]), exact[1] if exact else None, _name(match[3]), match[4].strip(" ,"), line)


def contradiction(case: Case) -> Iterator[Fix]:
    """Requirements that contradict each other: the companion that fits, then what is demanded, then no pin."""
    if not case.log.find(
        r"ResolutionImpossible|requirements are unsatisfiable|No solution found when resolving|"
        r"has requirement .*, but you have"
    ):
        return
    found = list(demands(case))
    for one in found:
        yield from _companion(case, one)
    for one in found:
        yield from _demanded(case, one)
    for one in found:
        yield from _unpinned(case, one.package, one.line)
    for one in found:
        yield from _unpinned(case, one.name, one.line)


def _companion(case: Case, demand: Demand) -> Iterator[Fix]:
    wanted, torch = case.recipe.asked(demand.package), case.recipe.torch
    if demand.name != "torch" or demand.package not in ("torchvision", "torchaudio") or not wanted or not torch:
        return
    right = companion(demand.package, torch)
    if right and right != wanted.pin:
        after = rewrite(case.texts, wanted, case.recipe, f"{demand.package}=={right}")
        sentence = f"{demand.line}; for torch {torch} it is {demand.package} {right}"
        yield from case.fix(f"pair:{demand.package}=={right}", sentence, after, demand.line)


def _demanded(case: Case, demand: Demand) -> Iterator[Fix]:
    """Give another package the version that it demands."""
    wanted = case.recipe.asked(demand.name)
    if not wanted or wanted.requirement is None or not demand.specifier:
        return
    try:
        specifier = SpecifierSet(demand.specifier)
    except InvalidSpecifier:
        return
    if demand.name == "torch":
        fitting = [one.version for one in releases() if one.version in specifier]
        new = f"torch=={fitting[0]}" if fitting else f"torch{specifier}"
    else:
        extras = f"[{','.join(sorted(wanted.requirement.extras))}]" if wanted.requirement.extras else ""
        new = f"{demand.name}{extras}{specifier}"
    after = rewrite(case.texts, wanted, case.recipe, _quoted(new, case, wanted))
    sentence = f"{demand.line}: ask for {new}"
    yield from case.fix(f"demand:{new}", sentence, after, demand.line)


def _unpinned(case: Case, name: str, line: str) -> Iterator[Fix]:
    wanted = case.recipe.asked(name)
    if wanted and wanted.requirement and str(wanted.requirement.specifier) and name != "torch":
        extras = f"[{','.join(sorted(wanted.requirement.extras))}]" if wanted.requirement.extras else ""
        after = rewrite(case.texts, wanted, case.recipe, f"{name}{extras}")
        yield from case.fix(f"unpin:{name}", f"let pip choose the version of {name}", after, line)


def no_version(case: Case) -> Iterator[Fix]:
    """`No matching distribution`: an index that hides PyPI, another Python, no such version, a misspelt name."""
    found = case.log.find(r"No matching distribution found for ([\w.-]+)(?:\[[^\]]*\])?\s*(\S*)")
    offered = case.log.find(r"\(from versions: (.*)\)")
    if not found or is_network(case):
        return
    name, specifier = _name(found.match[1]), found.match[2]
    listed = [] if not offered or offered.match[1] == "none" else offered.match[1].split(", ")
    wanted = case.recipe.asked(name)
    yield from _hidden_index(case, name, found.line)
    yield from _newer_python(case, name, specifier, found.line)
    if wanted and listed:
        near = _nearest(specifier, listed)
        if near:
            new = f"{name}=={near}"
            after = rewrite(case.texts, wanted, case.recipe, new)
            yield from case.fix(f"version:{new}", f"there is no {name}{specifier}; take {new}", after, found.line)
    if wanted and not listed:
        other = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, WELL_KNOWN, 1, cutoff=0.8)), None)
        if other and other != name:
            after = rewrite(case.texts, wanted, case.recipe, wanted.text.replace(found.match[1], other, 1))
            yield from case.fix(f"name:{other}", f"there is no package {name}; install {other}", after, found.line)


def _hidden_index(case: Case, name: str, line: str) -> Iterator[Fix]:
    """torch's own index holds little else: beside PyPI, not instead of it."""
    for install in case.pip_commands:
        url = install.index
        if url and CUDA_INDEX.search(url):
            first, last = install.instruction.first, install.instruction.last
            part = re.sub(
                r"(?<!-)(--index-url|-i)(?=[ =])", "--extra-index-url", lines_of(case.dockerfile, first, last)
            )
            text = replace_lines(case.dockerfile, first, last, part)
            yield from case.fix(
                "extra-index", f"{url} has no {name}: ask it beside PyPI, not instead of it", text, line
            )
    for file, text in case.texts.files.items():
        if re.search(r"^(--index-url|-i)[ =]\S*/whl/(cu\d+|cpu)", text, re.MULTILINE):
            new = re.sub(r"(?m)^(--index-url|-i)(?=[ =]\S*/whl/)", "--extra-index-url", text)
            after = case.texts.replaced(file, new)
            yield from case.fix("extra-index", f"torch's index has no {name}: ask it beside PyPI", after, line)


def _newer_python(case: Case, name: str, specifier: str, line: str) -> Iterator[Fix]:
    """A version that exists, for another Python than the base image's."""
    own = case.recipe.python
    pin = re.fullmatch(r"==([\w.]+?)(\+\w+)?", specifier)
    needed: list[str] = []
    known = release(pin[1]) if name == "torch" and pin else None
    if known and own and own not in known.python:
        needed = list(known.python)
    ignored = case.log.find(r"versions that require a different python version: (.*)")
    if ignored and pin:
        for version, bound in re.findall(r"(\S+) Requires-Python ([^;]+)", ignored.match[1]):
            if version == pin[1]:
                needed = _pythons(bound)
    yield from _with_python(case, needed, line)


def other_python(case: Case) -> Iterator[Fix]:
    found = case.log.find(r"Package '(\S+)' requires a different Python: (\S+) not in '(.+?)'")
    if found:
        yield from _with_python(case, _pythons(found.match[3]), found.line)
        yield from _unpinned(case, _name(found.match[1]), found.line)


def _with_python(case: Case, needed: list[str], line: str) -> Iterator[Fix]:
    base = case.recipe.base
    if not needed or not base or base.family != "python" or not base.python or base.python in needed:
        return
    able = [one for one in needed if Version(one) >= Version("3.11")] or needed  # what windlass itself needs
    nearest = min(able, key=lambda one: abs(Version(one).minor - Version(base.python or "3").minor))
    image = re.sub(rf":{re.escape(base.python)}(\.\d+)?", f":{nearest}", base.image, count=1)
    yield from case.fix(f"python:{nearest}", f"Python {base.python} is the wrong one: build on {image}",
                        with_base(case.recipe, image), line)  # fmt: skip


def _pythons(bound: str) -> list[str]:
    try:
        specifier = SpecifierSet(bound.strip().rstrip(";"))
    except InvalidSpecifier:
        return []
    return [f"3.{minor}" for minor in range(8, 16) if specifier.contains(f"3.{minor}.99")]


def _nearest(specifier: str, listed: list[str]) -> str | None:
    """The newest release of the asked series, else the newest below what was asked, else the newest."""
    versions = sorted((v for one in listed if (v := _version(one)) and not v.is_prerelease), reverse=True)
    asked = next((v for text in re.findall(r"\d[\w.]*", specifier) if (v := _version(text))), None)
    if not versions:
        return None
    if asked is None:
        return str(versions[0])
    series = [one for one in versions if one.release[:2] == asked.release[:2]]
    below = [one for one in versions if one < asked]
    return str((series or below or versions)[0])


def _version(text: str) -> Version | None:
    try:
        return Version(text.strip())
    except InvalidVersion:
        return None


def _quoted(requirement: str, case: Case, wanted: Wanted) -> str:
    """In a shell < and > are redirections."""
    inside = wanted.place.file == case.texts.name and bool(re.search(r"[<>;! ]", requirement))
    line = case.texts.get(wanted.place.file).splitlines()[wanted.place.line - 1]
    already = re.search(rf"['\"]{re.escape(wanted.text)}['\"]", line)
    return f"'{requirement}'" if inside and not already else requirement


def _name(text: str) -> str:
    return canonicalize_name(re.sub(r"\[.*", "", text))
