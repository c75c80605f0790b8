"""The line of the log that says where the time until the first step went."""

from __future__ import annotations

import subprocess
import sys
import time

from windlass.trainer.startup import StartClock, process_begin


def test_parts_add_up_to_the_whole() -> None:
    clock = StartClock()
    clock.mark("imports")
    time.sleep(0.12)
    clock.mark("weights")
    text = clock.describe()
    whole = float(text.split()[3])
    parts = dict(part.rsplit(" ", 1) for part in text.partition(": ")[2].split(", "))
    assert list(parts) == ["imports", "weights"]
    assert float(parts["weights"]) >= 0.1
    assert abs(sum(map(float, parts.values())) - whole) <= 0.11  # each is rounded to a tenth


def test_time_before_the_first_line_of_python_counts() -> None:
    before = time.time()
    said = subprocess.run(
        [sys.executable, "-c", "from windlass.trainer.startup import process_begin; print(process_begin())"],
        capture_output=True,
        text=True,
        check=True,
    )
    after = time.time()
    assert before - 0.1 <= float(said.stdout) <= after
    assert process_begin() < before
