"""Windlass hauls PyTorch training from a laptop to hundreds of GPU nodes.

    import windlass

    run = windlass.load("my.yaml", "train.steps=200")
    job = windlass.submit(run, on="local")
    print(job.wait().summary.loss)

Everything here does what a command does, and returns what that command prints with `--json` (docs/python.md).
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from windlass.api.jobs import Job as Job
    from windlass.api.runs import dry_run as dry_run
    from windlass.api.runs import job as job
    from windlass.api.runs import jobs as jobs
    from windlass.api.runs import load as load
    from windlass.api.runs import plan_run as plan_run
    from windlass.api.runs import submit as submit
    from windlass.api.training import train as train
    from windlass.errors import UserError as UserError
    from windlass.spec import Run as Run

# Imported when they are first asked for: `import windlass` alone costs nothing, in every rank and every command.
_PLACES = {
    "Job": "windlass.api.jobs",
    "Run": "windlass.spec",
    "UserError": "windlass.errors",
    "dry_run": "windlass.api.runs",
    "job": "windlass.api.runs",
    "jobs": "windlass.api.runs",
    "load": "windlass.api.runs",
    "plan_run": "windlass.api.runs",
    "submit": "windlass.api.runs",
    "train": "windlass.api.training",
}
__all__ = ["Job", "Run", "UserError", "dry_run", "job", "jobs", "load", "plan_run", "submit", "train"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'windlass' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
