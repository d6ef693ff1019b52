"""A matrix of runs: its cells (one way to train each), the outcomes of runs, and the table."""
