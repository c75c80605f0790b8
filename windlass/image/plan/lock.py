"""Pin every package of a planned image, by a real resolver."""

from __future__ import annotations

from dataclasses import replace

from windlass.errors import ExitCode, UserError
from windlass.image.facts.table import facts
from windlass.image.plan.choose import ImagePlan
from windlass.image.plan.write import CONSTRAINTS, OWN, REQUIREMENTS
from windlass.image.state.resolver import Index, Question


def lock(plan: ImagePlan, index: Index) -> ImagePlan:
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
            exit_code=ExitCode.BAD_INPUT if answer.checked else ExitCode.FAILED,
        )
    pins = "".join(f"{one.name}=={one.version}\n" for one in sorted(answer.packages, key=lambda one: one.name))
    return replace(plan, files={**plan.files, CONSTRAINTS: pins})
