"""Inference on all ranks, in shards that survive the loss of a rank, and export of models."""
