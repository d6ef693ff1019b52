"""The precision of each rank, and the loss scale that all ranks share.

The module reads no file, clock or hardware.

The module also parses ``--shares``, ``--micro-batch`` and ``--hosts``.

Parameters, gradients and optimizer state are fp32 everywhere. Only the forward and backward passes
run under autocast. Every rank, also in fp32, multiplies its loss by the same scale, so that
gradients can be summed. After an overflow on any rank, the sum is not finite on any rank, and all
ranks skip the step.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from motley.errors import MotleyError
from motley.text import did_you_mean, plural

Value = TypeVar("Value")


@dataclass(frozen=True)
class PerRank(Generic[Value]):
    """A value for each rank.

    Attributes:
        flag: the option that has set the values.
        text: the value of the option, as the user wrote it.
        values: one value per rank, or a single value.
        for_all: True if the single value applies to any number of ranks.
    """

    flag: str
    text: str
    values: tuple[Value, ...]
    for_all: bool

    def for_ranks(self, ranks: int) -> tuple[Value, ...]:
        """Return one value for each of ``ranks`` ranks.

        Raises:
            MotleyError: the number of values is not ``ranks``.
        """
        values = self.values * ranks if self.for_all else self.values
        if len(values) != ranks:
            raise MotleyError(
                f"{self.flag} {self.text} has {plural(len(values), 'value')}, but "
                f"{ranks} ranks take part; give {ranks} values, or change -np and hosts.txt"
            )
        return values

    def only(self, ranks: Sequence[int]) -> "PerRank[Value]":
        """Return the values of some ranks."""
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
    """Return the values of ``--shares``, such as ``5,4,3``, ``1,0.5,0`` or ``equal``.

    The samples of each rank are in proportion to its share.

    Raises:
        MotleyError: the text is not valid.
    """
    if text == "equal":
        return PerRank("--shares", text, (1.0,), for_all=True)
    try:
        shares = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise MotleyError(
            f"--shares {text}: give numbers separated by commas, as in 3,2,1"
        ) from None
    if not all(0 <= share < float("inf") for share in shares) or sum(shares) <= 0:
        raise MotleyError(
            f"--shares {text}: give shares of 0 or more, at least one of them above 0"
        )
    return PerRank("--shares", text, shares, for_all=False)


def read_micro_batches(text: str) -> PerRank[int]:
    """Return the values of ``--micro-batch``: one size for all ranks, or one per rank.

    Raises:
        MotleyError: the text is not valid.
    """
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise MotleyError(
            f"--micro-batch {text}: give whole numbers of 1 or more, one for all ranks or one per "
            "rank"
        )
    return PerRank("--micro-batch", text, sizes, for_all=len(sizes) == 1)


def read_named_hosts(text: str) -> str | tuple[str, ...]:
    """Return the value of ``--hosts``: ``auto``, ``all``, or the names of hosts that may train."""
    if text in ("auto", "all"):
        return text
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def named_hosts(asked: str | tuple[str, ...], known: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names of the hosts that may train; None for ``auto`` and ``all``.

    Args:
        asked: value of ``--hosts``.
        known: names of the started hosts.

    Raises:
        MotleyError: a name is not among the started hosts.
    """
    if isinstance(asked, str):
        return None
    for name in asked:
        if name not in known:
            raise MotleyError(
                f"--hosts {','.join(asked)}: {name!r} is not among the started hosts, which are "
                f"{', '.join(dict.fromkeys(known))}{did_you_mean(name, known)}; name some of "
                "these, or give auto or all"
            )
    return asked


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Names of the precisions in other tools: torch's types, Lightning's and Accelerate's values.
_SPELLINGS = {
    "float32": "fp32", "32": "fp32", "32-true": "fp32", "no": "fp32", "bfloat16": "bf16",
    "bf16-mixed": "bf16", "float16": "fp16", "16": "fp16", "16-mixed": "fp16", "half": "fp16",
}  # fmt: skip

DYNAMIC_START = 2.0**16  # PyTorch's and DeepSpeed's own first guess
_LARGEST = 2.0**32  # above it, the squares in the norm of a scaled fp32 gradient overflow


def read_precisions(text: str) -> PerRank[str]:
    """Return the values of ``--precision``: one name for all ranks, or one per rank.

    Raises:
        MotleyError: a name is unknown.
    """
    names = tuple(_SPELLINGS.get(name, name) for name in text.split(","))
    for name in names:
        if name not in (*PRECISIONS, "auto"):
            raise MotleyError(
                f"--precision {name} is unknown{did_you_mean(name, (*PRECISIONS, 'auto'))}; "
                f"choose auto, {', '.join(PRECISIONS)}, or give one of these per rank"
            )
    return PerRank("--precision", ",".join(names), names, for_all=len(names) == 1)


def best_precision(capability: tuple[int, int] | None) -> tuple[str, str]:
    """Return the fastest precision of a device with a CUDA capability, and the reason.

    Args:
        capability: major and minor version; None for a CPU.
    """
    if capability is None:
        return "fp32", "a CPU"
    label = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        return "bf16", label
    if capability >= (7, 0):
        return "fp16", f"{label} has no fast bf16"
    return "fp32", f"{label} has no fast 16-bit type"


# Vega GPUs of the ninth generation, without bf16. Earlier generations lack a fast 16-bit type.
_VEGA = ("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c")


def best_precision_of_amd(architecture: str) -> tuple[str, str]:
    """Return the fastest precision of an AMD GPU, and the reason.

    Args:
        architecture: name that ROCm uses, such as ``gfx942:sramecc+:xnack-``. The last two digits
            of ``gfx942`` are hexadecimal, and the digits before them are the generation.
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
    """Return the value of ``--loss-scale``: auto, dynamic, or a number such as 65536 or 2^24.

    Raises:
        MotleyError: the text is not valid.
    """
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
    """Return the shared loss scale for the start of a run.

    A number is the initial scale, which is then adjusted dynamically. ``auto`` is a constant 1
    unless a rank computes in fp16. In that case motley.train.scale_search finds the initial scale.

    Args:
        asked: value of ``--loss-scale``.
        precisions: precisions of the ranks.
    """
    if asked == "auto" and "fp16" not in precisions:
        return LossScale(1.0, dynamic=False)
    return LossScale(DYNAMIC_START if isinstance(asked, str) else asked)


@dataclass
class LossScale:
    """The shared loss scale. Every rank has a copy, and updates it by the same overflows.

    Attributes:
        value: factor on the loss of the next step.
        dynamic: True if the scale doubles after ``growth_interval`` steps without overflow, and
            halves after each overflow, as in torch.amp.GradScaler. False: the scale never changes.
        growth_interval: steps without overflow after which the scale doubles.
        good_steps: steps without overflow since the last change of the scale.
    """

    value: float
    dynamic: bool = True
    growth_interval: int = 2000
    good_steps: int = 0

    @property
    def may_clear(self) -> bool:
        """True if a lower scale may still avoid the present overflow.

        At a scale below 1 an overflow shows that the gradients themselves are too large.
        """
        return self.dynamic and self.value >= 1

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step.

        Args:
            overflow: True if a gradient of the step was infinite or NaN.
        """
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
        """Load the state from a checkpoint, unless the saved or the present scale is fixed.

        If the ranks' precisions have changed since the checkpoint, one of the two scales may be
        fixed and the other dynamic.
        """
        if self.dynamic and state["dynamic"]:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
