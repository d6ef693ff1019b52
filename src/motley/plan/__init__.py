"""Pure functions that compute each rank's samples, the expected time of a step, and advice."""
