"""What a run does now: its records followed while they are written, and what they say."""
