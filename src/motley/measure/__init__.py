"""What is timed: a device, an all-reduce, the links between machines."""
