"""Pictures and pages of runs' records, and the live view of runs."""
