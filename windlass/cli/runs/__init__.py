"""Commands on runs: plan, run, sweep, ls, show, logs, why, notify, stop, rm; and the loop that submits a run again."""
