"""The options of the training scripts, each declared once, with its type and its group."""
