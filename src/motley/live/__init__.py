"""A run that goes on: its records, followed while they are written, and their meaning."""
