"""What a step frees stays with the process: counted in page faults, of which a step without it has one per 4 KiB."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from windlass.trainer.startup import keep_freed_memory
if "kept" in sys.argv and not keep_freed_memory():
    print("no switch"), sys.exit()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    return torch.ones(10 << 20)  # 40 MiB
for _ in range(30):
    step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""


def faults_of(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_freed_memory_is_used_again() -> None:
    kept = faults_of("kept")
    if kept == "no switch":
        pytest.skip("this C library has no such switch")
    assert int(kept) < 1000 < int(faults_of())
