"""Tasks: the model to train, its samples, its losses, and the cost of a batch."""
