"""What every rank runs: model, data, steps, checkpoints. The only room that imports torch."""
