"""Every file of a run: what is in it, who writes it, who reads it."""

from motley.records.columns import Run, load

__all__ = ["Run", "load"]
