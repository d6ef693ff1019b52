"""Checkpoints: writing, reading and verifying the state from which a run can continue."""
