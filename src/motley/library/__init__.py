"""Motley as a library: the user's own loop, on all machines, with the result of one."""
