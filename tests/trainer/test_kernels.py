"""The Triton kernels compute what their plain twins do: interpreted on the CPU, element by element."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_kernels_agree_with_their_twins() -> None:
    pytest.importorskip("triton", reason="torch brings Triton on Linux only")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.kernel_twins"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels agree" in done.stdout
