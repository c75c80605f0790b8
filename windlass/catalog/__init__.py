"""What is known of models, GPUs and instances: data files and lookup."""
