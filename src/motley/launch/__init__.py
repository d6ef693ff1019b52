"""The ranks of one launch: the number of this rank, the living ranks, and the common end."""
