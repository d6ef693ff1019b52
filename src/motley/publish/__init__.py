"""What a run records, published to the tracker that its user looks at."""
