"""The options of the training scripts. Each option is declared once, with its type and group."""
