"""A run as Kubernetes objects. Pure: a run and facts about a cluster in, dicts out."""
