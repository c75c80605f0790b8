"""The trainer on GPUs with several ranks, over the real NCCL: `make test-gpu`."""
