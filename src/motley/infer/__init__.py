"""One rank's part of an inference, in shards that survive it."""
