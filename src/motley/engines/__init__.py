"""Engines, which turn micro-batches into optimizer steps: DDP, FSDP, ZeRO and Local SGD."""
