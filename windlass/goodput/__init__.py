"""Goodput, the share of paid time that trains: counted for a run, and expected of a plan. Pure."""
