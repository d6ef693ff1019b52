"""How far two results of a script are apart."""

from typing import Any


def difference(one: Any, other: Any) -> float:
    """The largest difference of their numbers, relative above 1; infinite for unlike shapes."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return float("inf")
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list):
        if len(one) != len(other):
            return float("inf")
        return max((difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    return abs(one - other) / max(1.0, abs(one))
