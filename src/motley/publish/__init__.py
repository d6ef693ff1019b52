"""The records of a run, published to the tracker that its user looks at."""
