"""Inference on all ranks, in shards whose results survive the loss of a rank; and model export."""
