"""The speeds of paced hosts, as in 7:5:3:2:1, and what they can do together."""

from collections.abc import Sequence


def parse_speeds(text: str) -> list[float]:
    """Return the relative speeds that a text such as 7:5:3:2:1 names."""
    return [float(word) for word in text.split(":")]


def list_rates(speeds: Sequence[float], fastest_s: float) -> list[float]:
    """Return the samples per second of each host.

    Args:
        speeds: relative speeds.
        fastest_s: seconds of a sample on the fastest host.
    """
    return [speed / max(speeds) / fastest_s for speed in speeds]
