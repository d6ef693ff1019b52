"""The ranks of one launch: the number of this rank, the other ranks, and their common end."""
