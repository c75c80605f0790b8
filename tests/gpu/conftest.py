"""The CUDA cases are collected only where a GPU is, or where they are tried without one."""

import os
from pathlib import Path

from tests.gpu.machine import ON_CPU

HERE = any(Path("/dev").glob("nvidia[0-9]*")) or ON_CPU in os.environ
collect_ignore = [] if HERE else ["test_gpu.py"]
