"""Training speed on one GPU: windlass beside torchtitan and a plain transformers loop. `python -m benchmarks.gpu`."""
