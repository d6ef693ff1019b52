"""Motley as a library: a user's own loop trains on all machines, with the result of one machine."""
