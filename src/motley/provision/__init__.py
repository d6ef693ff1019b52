"""Preparation of hosts: keys, environments, files, networks, job scripts, and their checks."""
