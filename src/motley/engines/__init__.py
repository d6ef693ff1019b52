"""Engines: the work between a micro-batch and a changed parameter."""
