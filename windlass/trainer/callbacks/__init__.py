"""What happens beside training: validation, saving, metrics and others. callback.py says how to add one."""
