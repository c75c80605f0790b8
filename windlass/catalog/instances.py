"""AWS GPU instance types: what each has and, where it is known, what it costs."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from windlass.catalog.gpus import Gpu, gpus
from windlass.errors import UserError


@dataclass(frozen=True)
class Price:
    usd_per_hour: float
    region: str
    date: str | None = None


@dataclass(frozen=True)
class Instance:
    type: str
    gpu: Gpu
    gpus: int
    nvlink: bool
    arch: str
    vcpus: int
    ram_gib: int
    efa: int | None
    network_gbps: float | None
    nvme_gb: float | None
    on_demand: Price | None  # None: no such price is published, which is not the same as free
    spot: Price | None  # the lowest region's
    uncertain: tuple[str, ...]  # fields on which the sources disagree
    note: str


@cache
def instances() -> dict[str, Instance]:
    entries = json.loads(resources.files(__package__).joinpath("instances.json").read_text())
    return {entry["type"]: _instance(entry) for entry in entries}


def _instance(entry: dict[str, Any]) -> Instance:
    changed = {
        "gpu": gpus()[entry["gpu"]],
        "on_demand": entry["on_demand"] and Price(**entry["on_demand"]),
        "spot": entry["spot"] and Price(**entry["spot"]),
        "uncertain": tuple(entry["uncertain"]),
    }
    return Instance(**{**entry, **changed})


def instance(name: str) -> Instance:
    """An instance type by its EC2 or HyperPod (`ml.…`) name."""
    known = name.strip().lower().removeprefix("ml.")
    if known in instances():
        return instances()[known]
    family = known.partition(".")[0]
    near = difflib.get_close_matches(known, instances(), 1, cutoff=0.6)
    families = {name: name.partition(".")[0] for name in instances()}
    siblings = [name for name in families if families[name] == family]
    raise UserError(
        f"there is no GPU instance type {name!r} in the catalogue",
        evidence=f"{family} has {', '.join(siblings)}"
        if siblings
        else f"families: {', '.join(dict.fromkeys(families.values()))}",
        fix=f"resources.instance={near[0]}    or --instance {near[0]}" if near else None,
    )
