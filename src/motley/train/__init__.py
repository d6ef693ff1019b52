"""The one training loop, what it is set up from, and what helps where something goes wrong."""
