"""A matrix of runs that compares ways to train: its cells, the outcomes of runs, and the table."""
