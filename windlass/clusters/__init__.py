"""Clusters: which there are, and whether one can take a run. On top of the Kubernetes target and of AWS."""
