"""Commands on runs: plan, run, follow, show, stop, sweep."""
