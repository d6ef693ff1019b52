"""Readers of options: numbers within bounds, and lists."""

import argparse
from dataclasses import dataclass

from motley.plan.ramp import RampedBatch
from motley.text import seconds_of


@dataclass(frozen=True)
class Duration:
    """A time, as a user has written it."""

    text: str
    seconds: int

    def __str__(self) -> str:
        return self.text


SLOWEST, ALL = "slowest", "all"  # of the ranks that are profiled


@dataclass(frozen=True)
class StepSpan:
    """Steps from ``first`` to the one before ``end``."""

    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"


def _number(text: str, kind: type, low: float, high: float, says: str) -> float:
    try:
        value: float = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {says}") from None
    if not low <= value <= high:  # NaN too
        raise argparse.ArgumentTypeError(f"{text} is not {says}")
    return value


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return int(_number(text, int, 1, 2**62, "a whole number of 1 or more"))


def batch_size(text: str) -> int:
    """A whole number of 1 or more, or a batch that grows; see motley.plan.ramp."""
    return RampedBatch(text) if ":" in text else positive(text)


def steps_or_time(text: str) -> int | Duration:
    """A whole number of 1 or more, or a time, as 10m."""
    if (seconds := seconds_of(text)) is not None:
        return Duration(text, seconds)
    says = "a number of steps of 1 or more, or a time, as 90s, 10m or 1h30m"
    return int(_number(text, int, 1, 2**62, says))


def natural(text: str) -> int:
    """A whole number of 0 or more."""
    return int(_number(text, int, 0, 2**62, "a whole number of 0 or more"))


def not_negative(text: str) -> float:
    """A number of 0 or more."""
    return _number(text, float, 0.0, 1e300, "a number of 0 or more")


def above_zero(text: str) -> float:
    """A number above 0."""
    return _number(text, float, 1e-300, 1e300, "a number above 0")


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    return _number(text, float, 0.0, 1.0, "a number from 0 to 1")


def names(text: str) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(text.split(","))


def naturals(text: str) -> tuple[int, ...]:
    """Whole numbers of 0 or more, between commas."""
    return tuple(natural(word) for word in text.split(","))


def positives(text: str) -> tuple[int, ...]:
    """Whole numbers of 1 or more between commas."""
    return tuple(positive(word) for word in text.split(","))


def step_span(text: str) -> StepSpan:
    """Two numbers of steps, as 20:40; the second is not among them."""
    first, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not two steps with a colon, as 20:40")
    span = StepSpan(natural(first), natural(end))
    if span.first >= span.end:
        raise argparse.ArgumentTypeError(f"{text} has no step; the second number is to be larger")
    return span


def profiled(text: str) -> str | tuple[int, ...]:
    """``slowest``, ``all``, or ranks between commas."""
    return text if text in (SLOWEST, ALL) else naturals(text)
