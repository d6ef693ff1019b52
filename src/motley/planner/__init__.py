"""From timings to a plan: who takes part, and how much each computes."""
