"""Changes that may heal a finding. Each is tried on the files and judged again before anyone sees it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from windlass.image.facts.table import Build, companion, facts, release, releases, runs
from windlass.image.read.requirements import Wanted
from windlass.image.read.texts import Texts, insert_after, lines_of, remove_word, replace_lines, substitute_within
from windlass.image.rules.finding import Case, Repair
from windlass.image.state.model import Package, Step, Where
from windlass.image.state.resolver import torch_tag

INDEX = re.compile(r"(download(?:-r2)?\.pytorch\.org/whl/)(?:nightly/|test/)?(cu\d+|cpu)\b")
PIP = re.compile(r"(\bpip[\d.]*\s+install)\b")
APT = "RUN apt-get update && apt-get install -y --no-install-recommends {} && rm -rf /var/lib/apt/lists/*"


def another_build(case: Case, torch: Package) -> tuple[Repair, ...]:
    """torch from the index of a CUDA build that the nodes can run."""
    if torch.origin != "pip":
        return ()
    known = release(torch.public) if torch.pinned else None
    fitting = [build for one in ([known] if known else releases()) for build in one.builds if _fits(case, build)]
    tags = dict.fromkeys(build.tag for build in fitting)
    moves = ("torch", "torchvision", "torchaudio")
    edits = {tag: partial(_with_index, where=torch.where, tag=tag) for tag in list(tags)[:3]}
    return tuple(_repair(f"take torch built with CUDA {tag[2:-1]}.{tag[-1]}", edits[tag], *moves) for tag in edits)


def _repair(sentence: str, edit: Callable[[Texts], Texts | None], *moves: str) -> Repair:
    return Repair(sentence, edit, frozenset(moves))


def _fits(case: Case, build: Build) -> bool:
    node = case.node
    has_code = not node.capability or build.runs_on(node.capability, node.platform)
    new_enough = not node.driver or runs(node.driver, build.minimum_driver)
    return has_code and new_enough and node.platform in build.platforms and build.status != "experimental"


def _with_index(texts: Texts, where: Where, tag: str) -> Texts:
    """The tag of torch's index where one is named, else the index beside PyPI; and the local version of pins."""
    for name in dict.fromkeys((where.cause.file, where.place.file)):
        text = texts.get(name)
        first, last = (where.first, where.last) if name == where.place.file else (1, text.count("\n") + 1)
        part = lines_of(text, first, last)
        changed = re.sub(r"\+(cu\d+|cpu)\b", f"+{tag}", INDEX.sub(rf"\g<1>{tag}", part))
        if changed != part:
            return texts.replaced(name, replace_lines(text, first, last, changed))
    return _with_option(texts, where, f"--extra-index-url {facts()['torch_index']['url']}{tag}")


def _with_option(texts: Texts, where: Where, option: str) -> Texts:
    """One more option of the pip command at a line."""
    text = texts.get(where.place.file)
    part = lines_of(text, where.place.line, where.last)
    return texts.replaced(
        where.place.file, replace_lines(text, where.place.line, where.last, PIP.sub(rf"\1 {option}", part, count=1))
    )


def companion_of_torch(case: Case, package: Package, torch: Package) -> tuple[Repair, ...]:
    """The release of a companion that is made for this torch."""
    right = companion(package.name, torch.public) if torch.name == "torch" else None
    if right is None or torch.origin != "pip":
        return ()
    name, pin = package.name, f"{package.name}=={right}"
    taken, beside = (
        partial(_pinned, case=case, package=package, wanted=pin),
        partial(_beside, case=case, torch=torch, pin=pin),
    )
    return (
        _repair(f"take {name} {right}, which is made for torch {torch.public}", taken, name),
        _repair(f"install {name} {right} together with torch {torch.public}", beside, name),
    )


def hold_version(
    case: Case, package: Package, requirement: Requirement | None = None, before: Package | None = None
) -> tuple[Repair, ...]:
    """The version that is demanded, or that an earlier step installed, named in the step that would move it."""
    wanted = f"{package.name}=={before.public}" if before and before.version else None
    if requirement is not None and str(requirement.specifier):
        wanted = f"{package.name}{requirement.specifier}"
    if wanted is None or package.origin != "pip":
        return ()
    edit = partial(_pinned, case=case, package=package, wanted=wanted, implied_only=before is not None)
    return (_repair(f"ask for {wanted} in the same step", edit, package.name),)


def pin_below(case: Case, package: Package, bound: str) -> tuple[Repair, ...]:
    wanted = f"{package.name}<{bound}"
    return (_repair(f"ask for {wanted}", partial(_pinned, case=case, package=package, wanted=wanted), package.name),)


def resolvable(case: Case, step: Step, blamed: Wanted | None) -> tuple[Repair, ...]:
    """torch's index for a local version, the companion of a pinned torch, a Python that has wheels."""
    if blamed is None or not blamed.pin:
        return ()
    found: list[Repair] = []
    where = at_line(step, blamed)
    local = re.search(r"\+(cu\d+|cpu)$", blamed.pin)
    tags = {tag for url in step.index if (tag := torch_tag(url))}
    if local and len(tags) == 1 and local[1] not in tags:  # two builds in one step fit each other by chance alone
        (tag,) = tags
        edit = partial(_with_index, where=where, tag=tag)
        found.append(_repair(f"take the build {tag}, which the index has", edit, blamed.name))
    elif local:
        option = f"--extra-index-url {facts()['torch_index']['url']}{local[1]}"
        found.append(_repair(f"ask torch's index for {blamed.pin}", partial(_with_option, where=where, option=option)))
    torch = step.asks("torch")
    for name in ("torchvision", "torchaudio", "xformers"):
        asked = step.asks(name)
        right = companion(name, torch.pin) if torch and torch.pin and asked else None
        if asked and right:
            rewrite = partial(_rewritten, wanted=asked, new=f"{name}=={right}")
            found.append(
                _repair(f"take {name} {right}, which is made for torch {torch.pin if torch else ''}", rewrite, name)
            )
    known = release(blamed.pin) if blamed.name == "torch" else None
    python, base = step.environment.python, case.trace.states[step.stage].base
    if known and python and base.family == "python" and python not in known.python:
        nearest = min(known.python, key=lambda one: abs(Version(one).minor - Version(python).minor))
        found += other_python(case, None, python, nearest)
    return tuple(found)


def other_python(case: Case, package: Package | None, python: str, other: str) -> tuple[Repair, ...]:
    """The image of another Python, where the base is one."""
    base = case.trace.states[_stage_of(case, package) if package else case.trace.final_stage].base
    if base.family != "python":
        return ()
    edit = partial(_with_base_text, case=case, old=python, new=other)
    return (_repair(f"build on Python {other}, for which there are wheels", edit),)


def after_torch(case: Case, package: Package) -> tuple[Repair, ...]:
    """A package that compiles against torch, in a command of its own after torch and without build isolation."""
    edit = partial(_alone, case=case, package=package)
    return (_repair(f"build {package.name} after torch, without build isolation", edit),)


def devel_base(case: Case, package: Package) -> tuple[Repair, ...]:
    """The devel image of the same base, which has nvcc."""
    base = case.trace.states[_stage_of(case, package)].base
    devel = re.sub(r"-(runtime|base)\b", "-devel", base.image)
    if devel == base.image or base.family not in ("cuda", "torch"):
        return ()
    return (Repair(f"build on {devel}, which has nvcc", lambda texts: _with_base_text(texts, case, base.image, devel)),)


def apt_install(case: Case, where: Where, package: str) -> tuple[Repair, ...]:
    if case.trace.final.base.alpine:
        return ()
    return (replace(line_before(where, APT.format(package)), sentence=f"install {package}"),)


def line_before(where: Where, line: str) -> Repair:
    """A line of its own before the instruction."""
    at = where.first - 1
    return _repair(
        f"{line} before it", lambda texts: texts.with_dockerfile(insert_after(texts.dockerfile or "", at, line))
    )


def replace_in_instruction(where: Where, old: str, new: str) -> Repair:
    def edit(texts: Texts) -> Texts:
        text = texts.dockerfile or ""
        part = lines_of(text, where.first, where.last)
        if old in part:
            return texts.with_dockerfile(replace_lines(text, where.first, where.last, part.replace(old, new)))
        return texts.with_dockerfile(re.sub(rf"(?m)^((?:ARG|ENV)\s+\w+=){re.escape(old)}\s*$", rf"\g<1>{new}", text))

    return Repair(f"{new} in place of {old}" if new else f"without {old.strip()}", edit)


def _wanted_in(case: Case, package: Package) -> Iterator[Wanted]:
    """The requirements of a package in the step that brought it."""
    for step in case.trace.steps:
        if step.after.get(package.name) == package and step.before.get(package.name) != package:
            yield from (one for one in step.wanted if one.name == package.name and not one.constraint)


def _pinned(texts: Texts, case: Case, package: Package, wanted: str, *, implied_only: bool = False) -> Texts | None:
    """A requirement as it should be: written anew where it stands, else one more word of the command."""
    written = next(_wanted_in(case, package), None)
    if written and not written.url:
        return None if implied_only else _rewritten(texts, written, wanted)
    return _more_words(texts, package.where, wanted)


def _rewritten(texts: Texts, wanted: Wanted, new: str) -> Texts | None:
    if wanted.place.file not in (texts.name, *texts.files):
        return None
    text, line = texts.get(wanted.place.file), wanted.place.line
    local = re.search(r"\+\w+$", wanted.pin or "")
    already = re.search(rf"['\"]{re.escape(wanted.text)}['\"]", lines_of(text, line, line))
    quoted = f'"{new}"' if wanted.place.file == texts.name and re.search(r"[<>]", new) and not already else new
    changed = substitute_within(text, line, line, wanted.text, (quoted + local[0]) if local and "==" in new else quoted)
    if changed == text and wanted.pin:  # the version comes from an ARG or ENV
        value = new.partition("==")[2]
        changed = (
            re.sub(rf"(?m)^((?:ARG|ENV)\s+\w+=['\"]?){re.escape(wanted.pin)}(?=['\"]?\s*$)", rf"\g<1>{value}", text)
            if value
            else text
        )
    return texts.replaced(wanted.place.file, changed)


def _beside(texts: Texts, case: Case, torch: Package, pin: str) -> Texts | None:
    written = next(_wanted_in(case, torch), None)
    return _more_words(texts, torch.where, pin) if written else None


def _more_words(texts: Texts, where: Where, word: str) -> Texts:
    """One more requirement of the pip command, right after `install`."""
    quoted = f'"{word}"' if re.search(r"[<>]", word) else word
    return _with_option(texts, where, quoted)


def _with_base_text(texts: Texts, case: Case, old: str, new: str) -> Texts | None:
    """Another base image, in FROM or in the ARG that FROM reads."""
    text = texts.dockerfile or ""
    read = [
        one
        for one in case.dockerfile.instructions
        if one.keyword == "ARG" and one.stage == -1 and re.search(rf"=['\"]?{re.escape(old)}", one.text)
    ]
    for instruction in (case.stages()[0].start, *read):
        line = lines_of(text, instruction.first, instruction.last)
        if old in line:
            changed = replace_lines(text, instruction.first, instruction.last, line.replace(old, new, 1))
            return texts.with_dockerfile(changed)
    return None


def _alone(texts: Texts, case: Case, package: Package) -> Texts | None:
    written = next(_wanted_in(case, package), None)
    step = next((one for one in case.trace.steps if one.after.get(package.name) == package), None)
    if written is None or step is None or (package.compiled is None and not package.url):
        return None
    try:
        Version(package.public)
        plain = f"{package.name}=={package.public}" if written.pin else written.text
    except InvalidVersion:
        plain = written.text
    text = texts.dockerfile or ""
    others = step.text.partition(" install ")[2].replace(written.text, "", 1).split()
    if all(word.startswith("-") for word in others) and written.place.file == texts.name:
        return _with_option(texts, step.where, "--no-build-isolation")
    command = "uv pip install" if step.by_uv else "pip install"
    if written.place.file == texts.name:
        shorter = texts.with_dockerfile(remove_word(text, step.where.first, step.where.last, written.text))
        text = shorter.dockerfile or ""
        if written.url and text.count("\n") != (texts.dockerfile or "").count("\n"):
            return None
    else:
        line = written.place.line
        texts = texts.replaced(written.place.file, replace_lines(texts.get(written.place.file), line, line, ""))
    return texts.with_dockerfile(insert_after(text, step.where.last, f"RUN {command} --no-build-isolation {plain}"))


def _stage_of(case: Case, package: Package) -> int:
    return next(
        (step.stage for step in case.trace.steps if step.after.get(package.name) == package), case.trace.final_stage
    )


def at_line(step: Step, wanted: Wanted) -> Where:
    inside = wanted.place.file == step.where.place.file
    place = wanted.place if inside and step.where.first <= wanted.place.line <= step.where.last else step.where.place
    return replace(step.where, place=place, cause=wanted.place)
