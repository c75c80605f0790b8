"""Rules about packages: what cannot be resolved, what does not fit together, what replaces what, numpy's ABI."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from windlass.image.facts.table import facts, removed_modules
from windlass.image.read.requirements import Wanted, wheel_of
from windlass.image.rules.finding import Case, Finding
from windlass.image.rules.repairs import at_line, companion_of_torch, hold_version, pin_below, resolvable
from windlass.image.state.contents import asserted_bounds, broken_import, imports_of, modules_of
from windlass.image.state.environments import DEFAULT_PYTHON
from windlass.image.state.install import applies
from windlass.image.state.model import SYSTEM, Environment, Package, Step

# A wrong version of these fails at import or in the first step; of others it is a remark.
CRITICAL = re.compile(
    r"torch.*|numpy|triton|nvidia-.*|transformers|tokenizers|huggingface-hub|xformers|vllm|flash-attn.*|deepspeed|"
    r"accelerate|peft|pydantic|protobuf|setuptools|ray"
)


BY_MAJOR = ("transformers", "huggingface-hub", "pydantic", "tokenizers")  # whose majors break what used them
NEVER_IMPORTS = re.compile(r"torch$|triton$|nvidia-|cuda-")  # large, and made with what they require


def unresolvable(case: Case) -> Iterator[Finding]:
    """No versions suit each other, or no wheel suits this Python and platform."""
    for step in case.trace.steps:
        trouble = step.answer.trouble
        if not trouble or not step.answer.checked or step.stage not in case.trace.used_stages:
            continue
        unsure = step.environment.python is None or case.trace.states[step.stage].base.family is None
        if unsure and _kind(trouble) != "contradiction":
            case.trace.unknown.append(f"{step.where}: {_sentence(trouble)} (with a Python that is assumed)")
            continue
        blamed = _blamed(step, trouble)
        where = step.where if blamed is None else at_line(step, blamed)
        yield case.error(_kind(trouble), _sentence(trouble), where, *resolvable(case, step, blamed))


def refused_names(case: Case) -> Iterator[Finding]:
    """Names under which PyPI has nothing that can be used, or another project than the one that is meant."""
    for step in case.trace.steps:
        for name, known in facts()["refused_names"]["names"].items():
            asked, package = step.asks(name), step.after.get(name)
            if not asked or asked.url or step.kind != "pip" or step.stage not in case.trace.used_stages:
                continue
            if "since" in known and not (package and package.at_least(known["since"])):
                continue
            if known.get("unless") not in case.trace.states[step.stage].variables:
                yield case.error(
                    "no-version",
                    f"{name} is not what it is called: {known['why']}; {known['right']} is meant",
                    at_line(step, asked),
                )


def removed_from_python(case: Case) -> Iterator[Finding]:
    """A release that is older than its Python and imports what the standard library has no more."""
    for environment in case.trace.final.environments.values():
        python = environment.python or ""
        came, removed = facts()["python_released"].get(python), removed_modules(python or "3")
        old = [
            package
            for package in environment.packages.values()
            if came and package.url and (package.uploaded or came) < came and not NEVER_IMPORTS.match(package.name)
        ]
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda package: imports_of(case.index, package.found), old))
        for package, pairs in zip(old, taken, strict=True):
            names = (f"{module}.{name}" if f"{module}.{name}" in removed else module for module, name in pairs)
            if lacking := next((name for name in names if name in removed), None):
                yield case.error(
                    f"import-of-{package.name}",
                    f"{package.name} {package.version} imports {lacking}, which Python {python} has no more",
                    package.where,
                )


def refused_metadata(case: Case) -> Iterator[Finding]:
    """pip since 24.1 refuses releases with invalid requirements: `PyYAML (>=5.1.*)`."""
    for step in case.trace.steps:
        pip = step.before.get("pip")
        version = pip.public if pip and pip.version else step.environment.pip
        since = facts()["pip_refuses"]["since"]
        if step.by_uv or step.kind != "pip" or not version or Version(version) < Version(since):
            continue
        source = f"which {pip.where} installed" if pip else "which the image brings"
        for name, package in step.after.items():
            for text in case.index.requires(package.found) if step.before.get(name) != package else ():
                try:
                    Requirement(text)
                except InvalidRequirement:
                    yield case.error(
                        "invalid-metadata",
                        f"{name} {package.version} requires {text!r}, which is not "
                        f"valid: pip {version}, {source}, refuses the release",
                        package.where,
                    )
                    break


def unsatisfied(case: Case) -> Iterator[Finding]:
    """A package of the final image whose own metadata asks for another version of one that is there."""
    case.index.prefetch(package.found for _, package in case.trace.final.everywhere)
    for environment in case.trace.final.environments.values():
        for package in list(environment.packages.values()):
            for text in case.index.requires(package.found):
                yield from _unsatisfied(case, environment, package, text)


def _unsatisfied(case: Case, environment: Environment, package: Package, text: str) -> Iterator[Finding]:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return
    name = canonicalize_name(requirement.name)
    other = environment.packages.get(name)
    marker = str(requirement.marker or "")
    # transformers asks for torch in an extra alone: it refuses an older one at import, and takes a newer one.
    optional = package.name == "transformers" and name == "torch" and "extra == 'torch'" in marker.replace('"', "'")
    specifier = requirement.specifier
    if optional:
        specifier = SpecifierSet(",".join(str(bound) for bound in specifier if bound.operator in (">=", ">")))
    if other is None and not requirement.marker and not requirement.extras:
        yield from _absent(case, environment, package, name)
    if (
        other is None
        or not other.version
        or package.wheel == other.wheel == ""  # a step that could not be resolved, which says it
        or (not optional and not applies(requirement, environment.python or DEFAULT_PYTHON, case.node.platform))
    ):
        return
    try:
        fits = specifier.contains(Version(other.public), prereleases=True)
    except InvalidVersion:
        return
    if fits or (other.origin == "conda" and other.version.count(".") < 2):
        return
    if re.search(r"\d(a|b|rc)\d", other.public) and requirement.specifier.contains(other.public.split("a")[0]):
        return
    later = package if _order(case, package) > _order(case, other) else other
    sentence = f"{package.name} {package.version} requires {name}{specifier}, and the image has {name} {other.version}"
    if not CRITICAL.fullmatch(name):
        yield case.remark("requirement-broken", sentence, later.where)
        return
    repairs = companion_of_torch(case, package, other) if name == "torch" else hold_version(case, other, requirement)
    yield case.error(f"{name}-of-{package.name}", sentence, later.where, *repairs)


def unsaid_bounds(case: Case) -> Iterator[Finding]:
    """A release that takes any version of another, where the releases after it say that the next major is too new."""
    for environment in case.trace.final.environments.values():
        for package in environment.packages.values():
            if not package.url or not package.uploaded or NEVER_IMPORTS.match(package.name) or package.compiled:
                continue
            for text in case.index.requires(package.found):
                if (name := canonicalize_name(re.split(r"[\s\[(=<>!~;]", text, maxsplit=1)[0])) in BY_MAJOR:
                    other = environment.packages.get(name)
                    if other and other.version and "extra" not in text and not re.search(r"<|==|~=", text):
                        yield from _unsaid(case, package, other)


def _unsaid(case: Case, package: Package, other: Package) -> Iterator[Finding]:
    if not other.uploaded or _days(other) - _days(package) < 60:
        return
    for later in case.index.later(package.name, package.public):
        for text in case.index.requires(later):
            bound = re.match(rf"{re.escape(other.name)}\b[^;]*<\s*(\d+)(?:\.0)*(?![\d.])", text)
            if bound and "extra" not in text and other.at_least(bound[1]):
                later_one = other if _order(case, other) > _order(case, package) else package
                yield case.error(
                    f"{other.name}-of-{package.name}",
                    f"{package.name} {package.version} does not say which {other.name} is too new for it; "
                    f"{later.version} says {other.name}<{bound[1]}, and the image has {other.name} {other.version}",
                    later_one.where,
                    *hold_version(case, other, Requirement(f"{other.name}<{bound[1]}")),
                )
                return


def asserted_versions(case: Case) -> Iterator[Finding]:
    """OpenMMLab's packages refuse, as they are imported, others that are newer than they know."""
    for environment in case.trace.final.environments.values():
        for package in [one for one in environment.packages.values() if one.url and re.match(r"mm[a-z]", one.name)]:
            for name, newest in asserted_bounds(case.index, package.found):
                other = environment.packages.get(name)
                if other and other.version and other.at_least(newest):
                    later = other if _order(case, other) > _order(case, package) else package
                    yield case.error(
                        f"{name}-of-{package.name}",
                        f"{package.name} {package.version} refuses {name} {newest} and newer as it is imported, and "
                        f"the image has {name} {other.version}",
                        later.where,
                    )


def _absent(case: Case, environment: Environment, package: Package, name: str) -> Iterator[Finding]:
    """A requirement that --no-deps left out, or pip uninstall took away, and that importing the package needs."""
    known = case.trace.final.base.family in ("python", "cuda", "system") and package.origin == "pip" and package.wheel
    brought = any(step.after.get(package.name) == package and "--no-deps" in step.options for step in case.trace.steps)
    removed = next((step for step in case.trace.steps if step.kind == "uninstall" and name in step.before), None)
    if not known or not (brought or removed) or f"python3-{name}" in case.trace.final.brought:
        return
    modules = {module.split(".")[0].lower() for module, _ in imports_of(case.index, package.found)}
    if name.startswith("nvidia-") or name.replace("-", "_") in modules:
        yield case.error(
            "missing-requirement",
            f"{package.name} {package.version} needs {name}, and nothing installs it",
            removed.where if removed and not brought else package.where,
        )


def imports(case: Case) -> Iterator[Finding]:
    """A release that imports from another package what that does not have: no metadata says it, the files do."""
    for environment in case.trace.final.environments.values():
        pairs = [
            (package, environment.packages.get(name))
            for package in environment.packages.values()
            if package.url and package.uploaded and not NEVER_IMPORTS.match(package.name)
            for name in sorted({*_required(case, package, environment), "setuptools"} - {package.name})
            if _may_break(case, environment, package, name)
        ]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda found: imports_of(case.index, found), {package.found for package, _ in pairs}))
            list(pool.map(lambda found: modules_of(case.index, found), {other.found for _, other in pairs if other}))
        for package, other in pairs:
            modules = (
                ["pkg_resources"] if not other or other.name == "setuptools" else modules_of(case.index, other.found)
            )
            lacking = broken_import(case.index, package.found, other.found if other else None, modules)
            if not lacking:
                continue
            has = f"{other.name} {other.version} has none" if other else "no setuptools is installed"
            decides = other if other and _order(case, other) > _order(case, package) and package.pinned else package
            yield case.error(
                f"import-of-{package.name}",
                f"{package.name} {package.version} imports {lacking}, and {has}",
                decides.where,
            )


def _may_break(case: Case, environment: Environment, package: Package, name: str) -> bool:
    """Whether two packages are of other times, and the one imports the other by its metadata."""
    other = environment.packages.get(name)
    if package.origin == "base" and (other is None or other.origin == "base"):
        return False  # proven by who made the image
    if not package.url or not package.uploaded or (other and not (other.url and other.uploaded)):
        return False
    if name == "setuptools":  # nobody declares it
        gone = other.at_least("82") if other else Version(environment.python or "3") >= Version("3.12")
        own = case.trace.final.base.family in ("python", "cuda", "system") and "python3-setuptools" not in _apt(case)
        return gone and own and package.uploaded < facts()["change_names"]["setuptools_until"]
    apart = 60 if package.pinned or (other and other.pinned) else 180
    if other is None or abs(_days(package) - _days(other)) < apart:
        return False  # released side by side
    return name != "numpy" or (package.uploaded < facts()["numpy2"]["released"] and other.at_least("2"))


def _apt(case: Case) -> set[str]:
    names = set(case.trace.final.apt)
    return names | ({"python3-setuptools"} if "python3-pip" in names else set())


def _required(case: Case, package: Package, environment: Environment | None = None) -> set[str]:
    """What a package requires; with an environment, also what the torch there requires, which it may import too."""
    needs = (require for require in case.index.requires(package.found) if "extra" not in require.partition(";")[2])
    names: set[str] = {canonicalize_name(re.split(r"[\s\[(=<>!~;]", require, maxsplit=1)[0]) for require in needs}
    torch = environment.packages.get("torch") if environment and "torch" in names else None
    return names | _required(case, torch) if torch else names


def _days(package: Package) -> int:
    return date.fromisoformat(package.uploaded or "1970-01-01").toordinal()


def replaced(case: Case) -> Iterator[Finding]:
    """A step that puts another version in the place of one that an earlier step pinned, or that the base brings."""
    for step in case.trace.steps:
        if step.stage not in case.trace.used_stages or step.kind == "uninstall":
            continue
        final = case.trace.states[step.stage].environments.get(step.environment.prefix)
        for name, before in step.before.items():
            after = step.after.get(name)
            if after is None or before.version is None or after.version in (None, before.version):
                continue
            if before.origin == "conda" and f"{after.version}.".startswith(f"{before.version}."):
                continue  # conda's numpy=1.26 is any 1.26
            if final and (left := final.packages.get(name)) and left.version == before.version:
                continue  # a later step put it back
            yield from _replaced(case, step, before, after)


def replaced_in_unknown(case: Case) -> Iterator[Finding]:
    """NVIDIA's images hold a torch of their own also where their release is not in the table."""
    base = case.trace.final.base
    torch = case.trace.final.environments[SYSTEM].packages.get("torch")
    if base.family == "nvidia-torch" and not base.torch and torch and torch.origin == "pip":
        yield case.error(
            "torch-replaced",
            f"torch of {base.image} is replaced by {torch.version}: what the image has compiled against its own "
            "does not load any more",
            torch.where,
        )


def _replaced(case: Case, step: Step, before: Package, after: Package) -> Iterator[Finding]:
    asked = step.asks(after.name)
    by_base = before.origin == "base"
    implied = after.name == "torch" and asked is None and _other_build(before, after)
    if not before.pinned and not by_base and not implied:
        return
    if asked and asked.pin and by_base and case.trace.final.base.family != "nvidia-torch":
        yield case.remark(
            "base-torch",
            f"the base image brings {before.name} {before.version}, and {asked.text} is installed over it",
            at_line(step, asked),
        )
        return
    if after.name != "torch" and asked and (asked.pin or "--upgrade" in step.options):
        return  # the user asks for the other version himself
    reason = (
        f"{asked.text} asks for another"
        if asked and asked.bounded
        else "a package that this step installs wants another"
    )
    source = "the base image brings" if by_base else f"{before.where} installed"
    sentence = f"{after.name} {before.version}, which {source}, is replaced by {after.version}: {reason}"
    where = at_line(step, asked) if asked else after.where
    severe = after.name == "torch" or before.pinned
    if severe:
        yield case.error(f"{after.name}-replaced", sentence, where, *hold_version(case, after, None, before))
    else:
        yield case.remark(f"{after.name}-replaced", sentence, where)


def numpy_abi(case: Case) -> Iterator[Finding]:
    """numpy 2 under code that was compiled for numpy 1."""
    known = facts()["numpy2"]
    for environment in case.trace.final.environments.values():
        numpy, torch = environment.packages.get("numpy"), environment.packages.get("torch")
        if numpy is None or not numpy.at_least("2"):
            continue
        old = [torch] if torch and torch.version and not torch.at_least(known["torch_since"]) else []
        for package in environment.packages.values():
            compiled = re.search(r"-cp3\d+-", package.wheel or "")  # py3 wheels do not use numpy's C interface
            before = package.uploaded is not None and package.uploaded < known["compiles_since"]
            if compiled and before and package.name != "torch" and "numpy" in _required(case, package):
                old.append(package)
        if old:
            names = ", ".join(f"{one.name} {one.version}" for one in old[:3])
            later = max([numpy, *old], key=lambda one: _order(case, one))
            yield case.error(
                "numpy-abi",
                f"numpy {numpy.version} with {names}, compiled for numpy 1: it fails when they exchange arrays",
                later.where if later in (numpy,) or later.pinned else numpy.where,
                *pin_below(case, numpy, "2"),
            )


def wheel_tags(case: Case) -> Iterator[Finding]:
    """A wheel that is named by its address, for another Python or machine."""
    machine = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}[case.node.platform]
    for environment, package in case.trace.final.everywhere:
        wheel = wheel_of(package.url) if package.url and package.pinned else None
        if not wheel:
            continue
        machines = {tag.split("-")[-1] for tag in wheel[2]}
        pythons = {tag.split("-")[0] for tag in wheel[2]}
        own = f"cp{(environment.python or '').replace('.', '')}"
        if not any(one == "any" or one.endswith(machine) for one in machines):
            yield case.error(
                "wheel-platform",
                f"{package.wheel} is for {', '.join(machines)}; the nodes are {case.node.platform}",
                package.where,
            )
        elif environment.python and not any(
            python == own or python.startswith("py3") or "abi3" in str(wheel[2]) for python in pythons
        ):
            yield case.error(
                "wheel-python",
                f"{package.wheel} is for {', '.join(pythons)}; the image has Python {environment.python}",
                package.where,
            )


def _kind(trouble: str) -> str:
    if re.search(r"no wheels with a matching|no usable wheels|no source distribution", trouble):
        return "no-wheel"
    if re.search(r"does not satisfy Python|not supported by your dependencies", trouble):
        return "python-version"
    if re.search(r"was not found in the package registry|there is no version of|not found", trouble):
        return "no-version"
    return "contradiction"


def _sentence(trouble: str) -> str:
    """uv's own reason in one sentence."""
    text = " ".join(trouble.split())
    text = re.sub(r"^error: No solution found when resolving dependencies cause: ", "", text)
    text = re.sub(r"\s*hint: Wheels are required for.*$", "", text)
    text = re.sub(r", we can conclude that (?:your )?requirements are unsatisfiable\.?", "", text)
    first, *more = text.removeprefix("Because ").split(", we can conclude that ")
    short = not more or (len(more) == 1 and re.search(r"And because you require \S+$", more[0]))
    return (first if short else text)[:400]


def _blamed(step: Step, trouble: str) -> Wanted | None:
    """The requirement that the resolver names last in its first reason; torch's where it is named."""
    named = [
        one
        for one in step.wanted
        if re.search(rf"(?<![\w.-]){re.escape(one.name)}(?![\w-])", trouble.split("hint:")[0])
    ]
    bounded = [one for one in named if one.bounded] or named
    return bounded[0] if bounded else None


def _order(case: Case, package: Package) -> int:
    """How late a package came: the number of the step that brought it."""
    for number, step in reversed(list(enumerate(case.trace.steps))):
        if step.after.get(package.name) == package and step.before.get(package.name) != package:
            return number
    return -1


def _other_build(before: Package, after: Package) -> bool:
    return before.cuda != after.cuda or "+" in (before.version or "")
