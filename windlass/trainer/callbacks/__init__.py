"""What happens between two steps: validation, early stopping, saving, preemption, metrics. One file each."""
