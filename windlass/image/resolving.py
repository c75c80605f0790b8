"""Check a recipe by resolving each of its pip commands in order, as the build would run them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from windlass.image.bases import Base
from windlass.image.conflict import Conflict, Severity
from windlass.image.conflicts import Patch, patch
from windlass.image.logs import BuildLog
from windlass.image.node import Node
from windlass.image.patch import Texts
from windlass.image.recipe import CUDA_INDEX, Recipe, Step
from windlass.image.remedies import Case
from windlass.image.remedies.packages import contradiction, no_version
from windlass.image.requirements import Wanted
from windlass.image.resolver import GLIBC_OF, Answer, Question, resolve
from windlass.image.table import package

SOURCES = ("flash-attn", "deepspeed", "hyperpod-elastic-agent")  # of which the index has no wheels, with known needs
DEFAULT_PYTHON = "3.12"
MOST_ROUNDS = 6
LOCAL = re.compile(r"\+(cu\d+|cpu)\b")
Resolve = Callable[[Question], Answer]


@dataclass(frozen=True)
class Resolved:
    """What the resolver found: every package of the image, the conflicts, and what could not be checked."""

    packages: dict[str, str] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
    unchecked: tuple[str, ...] = ()


def check_by_resolving(recipe: Recipe, node: Node, ask: Resolve = resolve) -> Resolved:
    """Resolve command after command: what is installed stays where the next command allows it, as pip does it."""
    installed: dict[str, str] = {}
    conflicts: list[Conflict] = []
    unchecked: list[str] = []
    exact = True
    base = recipe.base
    if base and base.torch:
        installed["torch"] = base.torch
    for step in recipe.steps:
        question, skipped = _question(recipe, node, step)
        unchecked += skipped
        held = tuple(f"{name}=={version}" for name, version in installed.items())
        answer = ask(replace(question, constraints=(*question.constraints, *held)))
        if not answer.checked and (nearer := _without_torch_index(question)) != question:
            unchecked.append(
                f"{step.install.command[:60]}…: torch's index is out of reach; PyPI's builds are taken instead"
            )
            exact = False
            question, held = nearer, tuple(one.split("+")[0] for one in held)
            answer = ask(replace(question, constraints=(*question.constraints, *held)))
        if answer.trouble and answer.checked and held:
            alone = ask(question)  # pip would replace what is in the way
            if not alone.trouble:
                conflicts += _replaced(step, installed, alone.packages)
                answer = alone
        unchecked += [
            f"{name}: there is only its source, whose needs are known when it is built" for name in answer.left_out
        ]
        if answer.trouble:
            if answer.checked:
                conflicts.append(_contradiction(recipe, step, answer))
            else:
                unchecked.append(f"{step.install.command[:80]}: {_last(answer.trouble)}")
            continue
        installed |= dict(answer.packages)
    nccl = sorted(name for name in installed if name.startswith("nvidia-nccl-cu"))
    if len(nccl) > 1 and exact:  # PyPI's build may bring another NCCL than the one that was asked for
        text = f"the image gets {' and '.join(nccl)}: two NCCL libraries in one process"
        conflicts.append(Conflict("two-nccl", "error", text, None, tuple(f"{one}=={installed[one]}" for one in nccl)))
    return Resolved(installed, tuple(conflicts), tuple(dict.fromkeys(unchecked)))


def repair(texts: Texts, node: Node, ask: Resolve = resolve) -> tuple[Patch, Resolved]:
    """Every change that reading finds, then every change that only the resolver finds, until nothing more helps."""
    made = patch(texts, node)
    resolved = check_by_resolving(Recipe(made.after), node, ask)
    seen = {made.after.diff(texts)}
    for _ in range(MOST_ROUNDS):
        fixable = next((one for one in resolved.conflicts if one.fix), None)
        if fixable is None or fixable.fix is None:
            break
        again = patch(fixable.fix.apply(made.after), node)
        if again.after.diff(texts) in seen:
            break
        seen.add(again.after.diff(texts))
        made = Patch(texts, again.after, (*made.fixed, fixable, *again.fixed), again.left)
        resolved = check_by_resolving(Recipe(made.after), node, ask)
    return made, resolved


def _question(recipe: Recipe, node: Node, step: Step) -> tuple[Question, list[str]]:
    requirements: list[str] = []
    constraints: list[str] = []
    skipped: list[str] = []
    for one in step.wanted:
        if one.requirement is None or one.url:
            skipped.append(f"{one.text}: a file or an address, which the resolver is not asked about")
        elif one.constraint:
            constraints.append(str(one.requirement))
        elif one.name in SOURCES:
            needs = package(one.name)["requires"].get("torch")
            requirements += [f"torch{needs or ''}"]
            skipped.append(f"{one.text}: there is only its source; known of it is that it needs torch{needs or ''}")
        else:
            requirements.append(_plain(one))
    mirrors = [url for url in step.indexes if not CUDA_INDEX.search(url)]
    own = step.install.index if step.install.index in mirrors else None
    extra = tuple(url for url in step.indexes if url != own)
    return Question(
        requirements=tuple(requirements),
        constraints=tuple(constraints),
        python=recipe.python or DEFAULT_PYTHON,
        platform=node.platform,
        glibc=glibc_of(recipe.base),
        index=own,
        extra_indexes=extra,
    ), skipped


def glibc_of(base: Base | None) -> str:
    return GLIBC_OF.get(base.system if base and base.system else "", Question.glibc)


def _without_torch_index(question: Question) -> Question:
    """The same question to PyPI alone: its torch requires what the builds of torch's own index require, CUDA apart."""
    return replace(
        question,
        requirements=tuple(LOCAL.sub("", one) for one in question.requirements),
        constraints=tuple(LOCAL.sub("", one) for one in question.constraints),
        extra_indexes=tuple(one for one in question.extra_indexes if not CUDA_INDEX.search(one)),
    )


def _plain(wanted: Wanted) -> str:
    return str(wanted.requirement)


def _replaced(step: Step, before: Mapping[str, str], new: Mapping[str, str]) -> list[Conflict]:
    """Packages that a later command would put in the place of what an earlier one installed."""
    changed = {name: (before[name], new[name]) for name in before.keys() & new.keys() if before[name] != new[name]}
    place = step.wanted[0].place if step.wanted else None
    found = []
    for name in ("torch", *sorted(changed.keys() - {"torch"})):
        if name in changed:
            old, now = changed[name]
            severity: Severity = "error" if name == "torch" or name.startswith("nvidia-") else "warning"
            text = f"this command replaces {name} {old}, which an earlier one installed, with {now}"
            found.append(Conflict(f"reinstalls-{name}", severity, text, place, (step.install.command[:160],)))
    return found[:3]


def _contradiction(recipe: Recipe, step: Step, answer: Answer) -> Conflict:
    log = BuildLog(answer.trouble or "")
    case = Case(recipe, log)
    fix = next(iter([*contradiction(case), *no_version(case)]), None)
    lines = tuple(line.strip() for line in log.lines if line.strip())[-8:]
    place = step.wanted[0].place if step.wanted else None
    return Conflict("resolver", "error", f"{answer.resolver} finds no versions that suit each other", place, lines, fix)


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "no answer"
