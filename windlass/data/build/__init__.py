"""Make shards of sources: several processes, resumable, the same bytes whatever happens."""
