"""Reads ``--shares``, ``--micro-batch``, ``--hosts``: what is said once, or for each rank. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from motley.errors import MotleyError
from motley.text import did_you_mean

Value = TypeVar("Value")


@dataclass(frozen=True)
class PerRank(Generic[Value]):
    """A value for each rank.

    Attributes:
        flag: the option that gave it. text: as the user wrote it.
        values: one a rank, or one. for_all: that one is for all ranks, however many.
    """

    flag: str
    text: str
    values: tuple[Value, ...]
    for_all: bool

    def of(self, ranks: int) -> tuple[Value, ...]:
        """One for each of so many ranks."""
        values = self.values * ranks if self.for_all else self.values
        if len(values) != ranks:
            raise MotleyError(
                f"{self.flag} {self.text} is for {len(values)} rank{'s' * (len(values) != 1)}, but "
                f"{ranks} take part; give {ranks} values, or change -np and hosts.txt"
            )
        return values

    def only(self, ranks: Sequence[int]) -> "PerRank[Value]":
        """The same for these ranks alone."""
        if self.for_all:
            return self
        values = tuple(self.values[rank] for rank in ranks)
        return PerRank(
            self.flag,
            ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values),
            values,
            False,
        )

    def __str__(self) -> str:
        return self.text


def read_shares(text: str) -> PerRank[float]:
    """Read ``--shares``: samples a rank takes, in proportion; ``5,4,3``, ``1,0.5,0``, ``equal``."""
    if text == "equal":
        return PerRank("--shares", text, (1.0,), for_all=True)
    try:
        shares = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise MotleyError(
            f"--shares {text}: not numbers separated by commas, as in 3,2,1"
        ) from None
    if not all(0 <= share < float("inf") for share in shares) or sum(shares) <= 0:
        raise MotleyError(f"--shares {text}: shares are 0 or more, at least one above 0")
    return PerRank("--shares", text, shares, for_all=False)


def read_micro_batches(text: str) -> PerRank[int]:
    """Read ``--micro-batch``: one size for all, or one a rank."""
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise MotleyError(
            f"--micro-batch {text}: give one whole number of 1 or more, or one a rank"
        )
    return PerRank("--micro-batch", text, sizes, for_all=len(sizes) == 1)


def read_named_hosts(text: str) -> str | tuple[str, ...]:
    """Read ``--hosts``: ``auto``, ``all``, or the names of those that may train."""
    if text in ("auto", "all"):
        return text
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def named_hosts(asked: str | tuple[str, ...], known: Sequence[str]) -> tuple[str, ...] | None:
    """The names of those that may train; None for ``auto`` and ``all``.

    Args:
        known: names of the hosts that were started.
    """
    if isinstance(asked, str):
        return None
    for name in asked:
        if name not in known:
            raise MotleyError(
                f"--hosts {','.join(asked)}: there is no {name!r} among the started hosts, "
                f"{', '.join(dict.fromkeys(known))}{did_you_mean(name, known)}; or give auto, "
                "or all"
            )
    return asked
