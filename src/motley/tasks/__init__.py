"""What is learnt: the model, and what a batch costs."""
