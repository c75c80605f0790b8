"""Model presets, GPUs and instances: data files, and how they are looked up."""
