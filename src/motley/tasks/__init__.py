"""Tasks: the model to train, its samples, its losses, and its metrics."""
