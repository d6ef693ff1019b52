"""What each rank keeps: a file here adds a strategy by listing it under ``STRATEGIES``."""
