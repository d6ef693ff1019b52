"""Arithmetic without side effects: the samples of each rank, the expected time, faster options."""
