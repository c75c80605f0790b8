"""The rules, specific before generic: of those that fit, the first counts."""

from __future__ import annotations

from windlass.diagnose.rules import images, libraries, lifecycle, memory, network, scheduling, storage, user_code
from windlass.diagnose.rules.shapes import Rule, Where

RULES: tuple[Rule, ...] = (
    *memory.RULES,
    *libraries.RULES,
    *storage.RULES,
    *network.RULES,
    *user_code.RULES,
    *scheduling.RULES,
    *images.RULES,
    *lifecycle.RULES,
)


def rules_for(where: Where) -> tuple[Rule, ...]:
    return _BY_PLACE.get(where, ())


_BY_PLACE: dict[Where, tuple[Rule, ...]] = {}
for _rule in RULES:
    _BY_PLACE[_rule.where] = (*_BY_PLACE.get(_rule.where, ()), _rule)
