"""Triton kernels for NVIDIA GPUs; each has a plain torch twin that says what it computes and runs elsewhere."""
