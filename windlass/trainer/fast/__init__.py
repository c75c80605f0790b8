"""What makes a step fast: attention, the fused head, fp8, lean blocks, and their kernels."""
