"""Arithmetic without side effects: each rank's share, the expected time, and faster options."""
