"""The ranks of one launch: their numbers, the connections between them, and their end."""
