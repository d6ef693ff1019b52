"""A matrix of runs: its cells, how each run ended, and the rows of its table."""
