"""Measurements of devices, all-reduces and links between machines, and the plan based on them."""
