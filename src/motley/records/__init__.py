"""Every file of a run: what is in it, who writes it, who reads it."""
