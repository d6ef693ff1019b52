"""Motley: train one model on unequal machines, exactly, as fast as their sum."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]  # of the repository: its scripts, and the files beside them
__version__ = "0.1.0"
