"""The ranks of one launch: who am I of how many, who is alive, and how all end together."""
