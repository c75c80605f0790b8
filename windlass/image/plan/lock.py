"""Pin every package of a planned image, by a real resolver."""

from __future__ import annotations

from dataclasses import replace

from windlass.errors import ExitCode, UserError
from windlass.image.plan.write import CONSTRAINTS, OWN, REQUIREMENTS
from windlass.image.plan.choose import ImagePlan
from windlass.image.state.resolver import Question, resolve
from windlass.image.resolving import DEFAULT_PYTHON, glibc_of


def lock(plan: ImagePlan) -> ImagePlan:
    """The plan with a version for everything that pip installs."""
    of = plan.ingredients
    if of.torch is None:
        raise UserError(
            "the packages of this base image are not known before it is built, so nothing can be pinned against them",
            evidence=of.base.image,
            fix="image.base=null    lets windlass choose one",
        )
    wanted = [f"torch=={of.torch}", *of.companions]
    for name in (REQUIREMENTS, OWN):
        wanted += [line for line in plan.files.get(name, "").splitlines() if line and not line.startswith("-")]
    answer = resolve(
        Question(
            requirements=tuple(wanted),
            constraints=tuple(plan.files[CONSTRAINTS].splitlines()),
            python=of.python or DEFAULT_PYTHON,
            platform=of.platform,
            glibc=glibc_of(of.base),
            extra_indexes=(of.index,) if of.index else (),
        )
    )
    if answer.trouble:
        raise UserError(
            "the packages cannot be pinned",
            evidence=answer.trouble[-1500:],
            cause="requirements that contradict each other" if answer.checked else "an index that cannot be asked",
            exit_code=ExitCode.BAD_INPUT if answer.checked else ExitCode.FAILED,
        )
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(answer.packages.items()))
    return replace(plan, files={**plan.files, CONSTRAINTS: pins})
