"""Where samples come from, in which order, and how each rank reads its own."""
