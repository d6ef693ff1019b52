"""Checkpoints: the state that a run leaves to continue from, its way to the disk and back."""
