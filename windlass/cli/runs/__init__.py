"""Commands on runs: plan, run, follow, show, stop, compare, checkpoints."""
