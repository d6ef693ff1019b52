"""Where images come from: a file here adds a dataset by listing it under ``DATASETS``."""
