"""A reader that follows a run's records while they are written, and their interpretation."""
