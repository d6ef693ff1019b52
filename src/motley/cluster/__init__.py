"""The hosts of a run: the hostfile, their hardware, connections to them, and leftover processes."""
