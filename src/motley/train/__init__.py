"""The training loop, its setup, and the handling of faults during training."""
