""" "Did you mean": the nearest names, for errors about unknown ones."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str], most: int = 3) -> str:
    """`` (nearest: a, b)`` for the known names most like ``word``, or nothing."""
    close = get_close_matches(word, list(known), n=most, cutoff=0.5)
    return f" (nearest: {', '.join(close)})" if close else ""
