"""Samples: their sources, their global order, and the loader of each rank's share."""
