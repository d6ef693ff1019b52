"""Motley: train one model on unequal machines, exactly, as fast as their sum."""

__version__ = "0.1.0"
