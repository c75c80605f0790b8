"""Windlass hauls PyTorch training from a laptop to hundreds of GPU nodes."""

__version__ = "0.1.0"
