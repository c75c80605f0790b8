"""Reduce a table of AWS GPU instances to windlass/catalog/instances.json: python tools/make_instances.py TABLE.csv"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parents[1] / "windlass" / "catalog" / "instances.json"
GPU_NAMES = {  # the table's name → the catalogue's
    "A100": "A100-40GB",
    "GB200 (B200)": "GB200",
    "RTX PRO 6000 Server": "RTX PRO 6000",
}


def reduce(row: dict[str, str]) -> dict[str, Any]:
    """One instance type. A value the sources disagree on carries a `?` in the table and is listed as uncertain."""
    price, spot = _number(row["usd_per_hour_on_demand"]), _number(row["lowest_spot_usd_per_hour"])
    columns = {"efa": "efa_interfaces", "network_gbps": "network_gbps", "nvme_gb": "local_nvme_gb"}
    return {
        "type": row["instance_type"],
        "gpu": GPU_NAMES.get(row["gpu"], row["gpu"]),
        "gpus": int(row["gpu_count"]),
        "nvlink": row["nvlink"] == "yes",
        "arch": row["arch"],
        "vcpus": int(row["vcpu"]),
        "ram_gib": int(row["ram_gib"]),
        **{name: _number(row[column]) for name, column in columns.items()},
        "on_demand": None
        if price is None
        else {"usd_per_hour": price, "region": row["price_region"], "date": row["price_date"]},
        "spot": None if spot is None else {"usd_per_hour": spot, "region": row["lowest_spot_region"]},
        "uncertain": [name for name, column in columns.items() if "?" in row[column]],
        "note": row["note"] if "HyperPod CLI" not in row["note"] or "UNCERTAIN" in row["note"] else "",
    }


def _number(text: str) -> float | int | None:
    text = text.strip().rstrip("?")
    if not text:
        return None
    value = float(text)
    return int(value) if value.is_integer() else value


def table(path: Path) -> str:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [reduce(row) for row in csv.DictReader(file)]
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    OUTPUT.write_text(table(Path(arguments[0])), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
