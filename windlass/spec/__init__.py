"""The run file: what a user writes, typed. Pure; imports nothing of ours but the error type."""

from windlass.spec.loading import dump_run, load_run, parse_run
from windlass.spec.run import Run

__all__ = ["Run", "dump_run", "load_run", "parse_run"]
