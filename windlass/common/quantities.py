"""Amounts as Kubernetes writes them, to numbers and back."""

from __future__ import annotations

import re

AMOUNT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(m|u|n|[kMGTPE]i?|Ki|[eE][+-]?\d+)?")
SCALES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
SCALES |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60}
IN_BYTES = ("memory", "ephemeral-storage", "hugepages-")


def parse_quantity(text: str | int | float) -> float:
    """An amount as Kubernetes writes it: `1500m` is 1.5, `2Gi` is 2147483648."""
    if isinstance(text, int | float):
        return float(text)
    match = AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    number, suffix = float(match[1]), match[2] or ""
    if suffix[:1] in "eE" and suffix not in SCALES and suffix:
        return number * 10.0 ** int(suffix[1:])
    return number * SCALES.get(suffix, 1.0)


def show_quantity(resource: str, amount: float) -> str:
    """An amount of a resource for a person: `7.5` cores, `12 GiB`, `8` GPUs."""
    if resource.startswith(IN_BYTES):
        for unit, size in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
            if abs(amount) >= size:
                return f"{amount / size:.4g} {unit}"
        return f"{amount:.0f} B"
    return f"{amount:.4g}"
