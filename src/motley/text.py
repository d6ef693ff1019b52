"""Words that users write and read: the nearest names, for errors about unknown ones; the first of
many names; times, as 1h30m; steps, as they are counted; rates."""

import io
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from motley import ROOT

RUN = "run"  # the command of motley that runs a user's script
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MOST_S = 366 * 86400


def escape_unprintable() -> None:
    """Have this process print letters that its output's encoding lacks as ``\\xe9``. With
    ``PYTHONIOENCODING=ascii``, say, a path with such a letter would end it otherwise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def own_command() -> str:
    """Return the command of ``motley`` that runs this process (motley.cli); empty for a script."""
    program, _, name = sys.argv[0].partition(" ")
    return name if program == "motley" else ""


def typed_command(door: str) -> str:
    """Return how a user types a command of Motley.

    Args:
        door: the repository's script, as in ``plots/plot_gpu.py``.

    Returns:
        ``python plots/plot_gpu.py``; ``motley plot-gpu`` where the command runs this process, or
        there is no clone.
    """
    if own_command() or not (ROOT / door).exists():
        return f"motley {Path(door).stem.replace('_', '-')}"
    return f"python {door}"


def did_you_mean(word: str, known: Iterable[str], most: int = 3) -> str:
    """`` (nearest: a, b)`` for the known names most like ``word``, or nothing."""
    close = get_close_matches(word, list(known), n=most, cutoff=0.5)
    return f" (nearest: {', '.join(close)})" if close else ""


def name_some(names: Sequence[str], most: int = 4) -> str:
    """Return the first of some names, and how many more there are: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def seconds_of(text: str) -> int | None:
    """Of a time, as 2h, 30m or 1h30m; None of what is no time from 1s to 366d."""
    if not re.fullmatch(r"(?:[0-9]{1,6}[dhms])+", text):
        return None
    parts = re.findall(r"([0-9]+)([dhms])", text)
    seconds = sum(int(number) * _UNITS[unit] for number, unit in parts)
    return seconds if 0 < seconds <= _MOST_S else None


def step_in_words(step: int | None) -> str:
    """Which step, as people count: from 1, where records count from 0; None: before the first."""
    return "before the first step" if step is None else f"step {step + 1}"


def rate_in_words(rate: float) -> str:
    """As in 1,036; 9.6; 0.034: what is slow is not 0."""
    return f"{rate:,.0f}" if rate >= 9.95 or not rate else f"{rate:.2g}"


def clock(seconds: float) -> str:
    """Return a time as in 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
