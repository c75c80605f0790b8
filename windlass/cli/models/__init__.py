"""Commands on what a run made: its checkpoints and exports, and what its model says."""
