"""Records of a run, followed while they are written, and their interpretation."""
