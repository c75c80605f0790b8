"""Goodput, the share of paid time that trains: counted for a run, expected of a plan, simulated for a cluster. Pure."""
