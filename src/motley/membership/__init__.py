"""The ranks of a job: detection of lost ranks, recovery after a loss, and hosts that return."""
