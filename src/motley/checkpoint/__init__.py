"""Checkpoints: the state from which a run can continue, how it is written and how it is read."""
