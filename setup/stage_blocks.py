"""The arithmetic of setup/stage_cn.sh: blocks of a file, which are missing, sizes as people write
them. It reads no disk, clock or network."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from motley.errors import MotleyError

BLOCK = 8 << 20  # bytes that are hashed, and copied again, together
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Run:
    """Blocks beside each other, the last included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def blocks_of(size: int) -> int:
    """How many a file of so many bytes has; the last may be shorter."""
    return -(-size // BLOCK)


def bytes_in(run: Run, size: int) -> int:
    """Of these blocks of a file of ``size`` bytes."""
    return min(size, (run.last + 1) * BLOCK) - run.first * BLOCK


def missing(wanted: Sequence[str], there: Mapping[int, str], most: int) -> Iterator[Run]:
    """Blocks that are not there as they are wanted, in runs of at most so many.

    Args:
        wanted: the hash of each. there: of those that are, by number.
    """
    first = None
    for number in range(len(wanted) + 1):
        lacks = number < len(wanted) and there.get(number) != wanted[number]
        if first is not None and (not lacks or number - first == most):
            yield Run(first, number - 1)
            first = None
        if lacks and first is None:
            first = number


def size_of(text: str) -> int:
    """Bytes, as 20G or 500M, by 1,000 each; MotleyError for anything else."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([KMGT])B?", text.strip().upper())
    size = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not size:
        raise MotleyError(f"--budget {text!r} is no size; write it as 20G or 500M")
    return size


def said(size: float) -> str:
    """Bytes for people: 20 GB, 1.57 MB."""
    unit = next((unit for unit in "TGMK" if size >= _UNITS[unit]), "")
    if not unit:
        return f"{size:.0f} B"
    number = size / _UNITS[unit]
    return f"{number:,.0f} {unit}B" if number >= 99.95 else f"{number:.3g} {unit}B"
