"""This machine as a target: torchrun under a supervisor that restarts what can be restarted."""
