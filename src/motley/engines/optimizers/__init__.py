"""Optimizers beside timm's: a file here adds one by listing it under ``OPTIMIZERS``."""
