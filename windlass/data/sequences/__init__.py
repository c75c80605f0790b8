"""What the trainer reads: sequences by step and position, out of shards, streams and mixtures."""
