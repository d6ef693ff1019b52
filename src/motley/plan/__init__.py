"""Pure arithmetic: who computes how much, how long that takes, and what would be faster."""
