"""Token shards: their format, written and read, here and in object stores."""
