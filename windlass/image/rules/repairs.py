"""Changes that may heal a finding. Each is tried on the files and judged again before anyone sees it."""

from __future__ import annotations

from windlass.image.rules.finding import Case, Repair
from windlass.image.state.model import Package, Step, Where


def another_build(case: Case, torch: Package) -> tuple[Repair, ...]:
    return ()
def companion_of_torch(case, package, torch):
    return ()
def hold_version(case, package, requirement=None, before=None):
    return ()
def pin_below(case, package, bound):
    return ()
def resolvable(case, step, blamed):
    return ()
def after_torch(case, package):
    return ()
def devel_base(case, package):
    return ()
def apt_install(case, where, package):
    return ()
def environment_line(case, step, text):
    return Repair("", lambda texts: None)
def replace_in_instruction(where, old, new):
    return Repair("", lambda texts: None)
