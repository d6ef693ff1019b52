"""The precision of each rank, and the loss scale that all ranks share. Pure.

The module also reads ``--shares``, ``--micro-batch`` and ``--hosts``, which have one value for all
ranks or one each.

Parameters, gradients and optimizer state are fp32 everywhere; only the forward and
backward passes run under autocast. Every rank, fp32 ones too, multiplies its loss by the
same scale, so that summed gradients mean one thing and an overflow on any rank is seen
by all, who skip that step together.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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

    def for_ranks(self, ranks: int) -> tuple[Value, ...]:
        """One for each of so many ranks."""
        values = self.values * ranks if self.for_all else self.values
        if len(values) != ranks:
            raise MotleyError(
                f"{self.flag} {self.text} is for {len(values)} rank{'s' * (len(values) != 1)}, but "
                f"{ranks} take part; give {ranks} values, or change -np and hosts.txt"
            )
        return values

    def only(self, ranks: Sequence[int]) -> "PerRank[Value]":
        """Return the values of these ranks alone."""
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
    """Return the names of the hosts that may train; None for ``auto`` and ``all``.

    Args:
        asked: value of ``--hosts``.
        known: names of the started hosts.
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


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Other tools' names of these: torch's types, Lightning's and Accelerate's values.
_SPELLINGS = {
    "float32": "fp32", "32": "fp32", "32-true": "fp32", "no": "fp32", "bfloat16": "bf16",
    "bf16-mixed": "bf16", "float16": "fp16", "16": "fp16", "16-mixed": "fp16", "half": "fp16",
}  # fmt: skip

DYNAMIC_START = 2.0**16  # PyTorch's and DeepSpeed's own first guess
_LARGEST = 2.0**32  # above it, the squares in the norm of a scaled fp32 gradient overflow


def read_precisions(text: str) -> PerRank[str]:
    """Read ``--precision``: one name for all ranks, or one a rank separated by commas."""
    names = tuple(_SPELLINGS.get(name, name) for name in text.split(","))
    for name in names:
        if name not in (*PRECISIONS, "auto"):
            raise MotleyError(
                f"--precision {name} is unknown{did_you_mean(name, (*PRECISIONS, 'auto'))}; "
                f"choose auto, {', '.join(PRECISIONS)}, or one of these for each rank"
            )
    return PerRank("--precision", ",".join(names), names, for_all=len(names) == 1)


def best_precision(capability: tuple[int, int] | None) -> tuple[str, str]:
    """Return the precision that a device of this CUDA capability runs fast, and why."""
    if capability is None:
        return "fp32", "a CPU"
    label = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        return "bf16", label
    if capability >= (7, 0):
        return "fp16", f"{label} has no fast bf16"
    return "fp32", f"{label} has no fast 16-bit type"


# Vega without bf16, of the ninth generation; all before the ninth have no fast 16-bit type.
_VEGA = ("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c")


def best_precision_of_amd(architecture: str) -> tuple[str, str]:
    """Return the best precision of an AMD GPU, and why.

    Args:
        architecture: as ROCm names it, such as ``gfx942:sramecc+:xnack-``. The last two of its
            digits are hexadecimal, those before are its generation.
    """
    label = architecture.partition(":")[0]
    digits = label.removeprefix("gfx")[:-2]
    generation = int(digits) if digits.isdigit() else 0
    if generation >= 11 or (generation == 9 and label not in _VEGA):
        return "bf16", label
    if generation >= 9:
        return "fp16", f"{label} has no fast bf16"
    return "fp32", f"{label} has no fast 16-bit type"


def read_loss_scale(text: str) -> str | float:
    """Read ``--loss-scale``: auto, dynamic, or a number such as 65536 or 2^24."""
    if text in ("auto", "dynamic"):
        return text
    match = re.fullmatch(r"2(?:\^|\*\*)(-?\d{1,3})", text)
    try:
        value = 2.0 ** int(match[1]) if match else float(text)
    except (ValueError, OverflowError):
        value = math.nan
    if not 0 < value <= _LARGEST:
        raise MotleyError(
            f"--loss-scale {text}: choose auto, dynamic or a number up to 2^32, such as 2^16"
        )
    return value


def start_scale(asked: str | float, precisions: Collection[str]) -> "LossScale":
    """Return the shared scale as ``--loss-scale`` asks for it.

    A number is where the scale starts; it grows and backs off from there. ``auto`` is 1
    for good unless some rank computes in fp16; then motley.train.scale_search finds its start.
    """
    if asked == "auto" and "fp16" not in precisions:
        return LossScale(1.0, dynamic=False)
    return LossScale(DYNAMIC_START if isinstance(asked, str) else asked)


@dataclass
class LossScale:
    """The shared scale. Every rank holds a copy and updates it with the same news.

    Attributes:
        value: the factor on the loss of the coming step.
        dynamic: doubles after ``growth_interval`` steps without overflow and halves after
            each overflow, as torch.amp.GradScaler does; else it never changes.
        good_steps: steps since the last change.
    """

    value: float
    dynamic: bool = True
    growth_interval: int = 2000
    good_steps: int = 0

    @property
    def may_clear(self) -> bool:
        """True if a lower scale may still clear an overflow.

        Below a scale of 1 the gradients themselves are too large.
        """
        return self.dynamic and self.value >= 1

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step."""
        if not self.dynamic:
            return
        if overflow:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = min(self.value * 2, _LARGEST), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps, "dynamic": self.dynamic}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, unless its scale or this one is fixed.

        A scale may be fixed in one of them because the ranks' precisions have changed.
        """
        if self.dynamic and state["dynamic"]:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
