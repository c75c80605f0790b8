"""Every promise of speed that needs no GPU, measured in one run: `make bench`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import saving, store_reading, store_saving, tokenizing, training


def main() -> int:
    promises: list[tuple[str, Callable[[], dict[str, Any]], str, Callable[[dict[str, Any]], bool]]] = [
        (
            "a background save stalls training for less than a quarter of a synchronous one",
            saving.measure,
            "stall_ratio",
            lambda found: found["stall_ratio"] < 0.25,
        ),
        (
            "saving to S3 in the background stalls training for less than 2 % of its time",
            store_saving.measure,
            "stall_percent",
            lambda found: found["stall_percent"] < 2.0,
        ),
        (
            "tokenizing to shards is at least 1.5 × as fast as batched datasets.map",
            tokenizing.measure,
            "ratio",
            lambda found: found["ratio"] >= 1.5,
        ),
        (
            "shards in S3 are read within 5 % of the time from local disk, once they were read before",
            store_reading.measure,
            "ratio",
            lambda found: found["ratio"] <= 1.05,
        ),
        (
            "every tiny preset trains at no less than 0.97 × a plain transformers loop",
            training.measure,
            "lowest",
            lambda found: found["lowest"] >= 0.97,
        ),
    ]
    failed = 0
    for promise, measure, key, holds in promises:
        begin = time.monotonic()
        found = measure()
        held = holds(found)
        failed += not held
        print(f"{'holds ' if held else 'BROKEN'}  {promise}: {found[key]}   ({time.monotonic() - begin:.0f} s)")
        print(f"        {json.dumps(found)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
