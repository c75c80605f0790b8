"""The process of one contestant: measures, and prints its row as one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path

from benchmarks.gpu.contestants import Job, runner
from benchmarks.gpu.points import POINTS
from benchmarks.gpu.rows import failed, last_line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant")
    parser.add_argument("point", choices=POINTS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="an empty one, to write into")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args()
    point = POINTS[options.point]
    job = Job(options.contestant, point, options.steps, options.warmup, options.folder, tuple(options.overrides))
    try:
        row = runner(job.contestant)(job)
    except Exception as error:
        traceback.print_exc()
        row = failed(job.contestant, point.name, f"{type(error).__name__}: {last_line(str(error))}")
    print(json.dumps(row.as_dict()), flush=True)
    sys.stderr.flush()
    return 1 if row.error else 0


if __name__ == "__main__":
    sys.exit(main())
