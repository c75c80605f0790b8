"""What will happen, before it does: defaults filled in, checks that need no GPU, sizes. Pure."""

from windlass.plan.checks import check
from windlass.plan.resolution import resolve
from windlass.plan.shape import checkpoint_bytes, num_parameters

__all__ = ["check", "checkpoint_bytes", "num_parameters", "resolve"]
