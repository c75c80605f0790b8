"""Start-up: where the time until the first step goes, and what an earlier kill left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from windlass.trainer.startup import StartClock, drop_unfinished_kernels, process_begin


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


def test_kernels_whose_compiler_was_killed_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    unfinished, linking, whole = (tmp_path / folder / "kernel.main.so" for folder in ("ab", "cd", "ef"))
    for library, content in ((unfinished, b""), (linking, b""), (whole, b"\x7fELF")):
        library.parent.mkdir()
        library.write_bytes(content)
    for library in (unfinished, whole):
        os.utime(library, (0, 0))
    assert drop_unfinished_kernels() == [unfinished]
    assert (unfinished.exists(), linking.exists(), whole.exists()) == (False, True, True)
