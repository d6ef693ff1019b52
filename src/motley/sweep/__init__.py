"""A matrix of runs: its cells, the outcome of each run, and the rows of its table."""
