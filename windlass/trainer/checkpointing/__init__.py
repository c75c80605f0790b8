"""Save and resume: the tiers of a run, what each rank writes, and what it reads back."""
