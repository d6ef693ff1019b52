"""What ``--task`` can be: a file here adds one by listing its name and class under ``TASKS``."""
