"""The declaration of an option, and the readers of its values.

An option is declared once, with everything that other modules need. Readers accept numbers within
bounds, and lists.
"""

import argparse
import re
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Flag, auto
from types import NoneType, UnionType
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

from motley.errors import MotleyError
from motley.plan.length import RampedBatch
from motley.text import parse_seconds

NONE = "none"  # typed in place of a value: sets an option back to its default, which is no value
_OPTION = "option"  # of a field's metadata


class Decides(Flag):
    """The effects of an option, for code that keeps something between runs.

    MODEL: the meaning of the checkpoint's numbers: it cannot be continued with another.
    NUMBERS: the values that they reach: the user is warned that a continued run changes there.
    SPEED: how fast a device computes: a remembered speed is of these.
    PLAN: the split of the work, besides: a continued run keeps its plan while these stay.
    NOTHING: the place of the computation, the storage and the display of results.
    """

    NOTHING = 0
    MODEL = auto()
    NUMBERS = auto()
    SPEED = auto()
    PLAN = auto()


class Reader(Protocol):
    """A function that reads a user's text; raises argparse.ArgumentTypeError or MotleyError."""

    def __call__(self, text: str, /) -> Any:
        """Return the value of an option."""


@dataclass(frozen=True)
class Option:
    """The properties of an option, besides its name and default, which are its field's.

    Attributes:
        says: its effect, for ``--help-all``.
        name: as users and records call it, where its field is called otherwise.
        decides: the values that depend on it.
        read: its text.
        metavar: a word for its value in help. choices: all values; empty: any.
        flag: if not ``--`` and its name. short: another, of one letter. former: an older one.
        bare: its value where it is given without one; None: it needs one.
        several: True if it takes one word or more; its value is a tuple of each word's value.
        unset: the text for None. cell: how a matrix of runs says it, for whose cells it is.
        usual: the line of ``-h`` for it, if most users need it.
        per_launch: belongs to one launch, as paths of records and the shares of ranks do. A
            continued run takes every other option from its checkpoint, unless the user types it.
    """

    says: str
    decides: Decides
    read: Reader = str
    name: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    flag: str = ""
    short: str = ""
    former: str = ""
    bare: Any = None
    several: bool = False
    unset: str | None = None
    cell: str = ""
    usual: str = ""
    per_launch: bool = False

    def to_text(self, value: Any) -> Any:
        """Return a value in the form that records and checkpoints keep.

        The form is JSON, with texts that :attr:`read` reads.
        """
        if value is None:
            return self.unset
        if isinstance(value, tuple):
            return list(map(str, value)) if self.several else ",".join(map(str, value))
        return value if type(value) in (bool, int, float, str) else str(value)

    def from_text(self, text: Any) -> Any:
        """Read the output of :meth:`to_text`."""
        if isinstance(text, list):
            return tuple(self.read(each) for each in text)
        return self.read(text) if isinstance(text, str) else text


def option(says: str, decides: Decides, default: Any = None, **known: Any) -> Any:
    """Return a field of a frozen dataclass, a group of options; see Option for ``known``."""
    return field(default=default, metadata={_OPTION: Option(says, decides, **known)})


def get_options(group: type) -> dict[str, Option]:
    """Return the options of a group by the names of their fields; each has a name.

    A field may be declared without :func:`option`, as in a user's own task. Then its type decides
    the values that it takes, and it is taken to decide everything that is kept between runs.

    Raises:
        MotleyError: a field has a type that no option can have, or no default.
    """
    result: dict[str, Option] = {}
    for each in fields(group):
        declared = each.metadata.get(_OPTION)
        known = declared if isinstance(declared, Option) else _plain(group, each)
        result[each.name] = replace(known, name=known.name or each.name)
    return result


def _plain(group: type, each: "Field[Any]") -> Option:
    """Return the option of a field that has only its type and default."""
    name, hint = f"{group.__name__}.{each.name}", get_type_hints(group)[each.name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    if len(kinds) != 1 or kinds[0] not in (int, float, str, bool):
        raise MotleyError(
            f"{name} is of type {hint}, which no option can have; take int, float, str or bool, or "
            "declare it by motley.config.option.option()"
        )
    if each.default is MISSING or callable(each.default):
        raise MotleyError(
            f"{name} has no default; give it one"
            if each.default is MISSING
            else f"{name} is a field and a method; give the field another name"
        )
    says = "" if kinds[0] is bool else f"default {each.default}"
    usual = says or f"default {each.default}"
    everything = Decides.MODEL | Decides.NUMBERS | Decides.SPEED
    metavar = kinds[0].__name__.upper()
    return Option(says, everything, read=kinds[0], metavar=metavar, usual=usual)


def get_flag(declared: Option) -> str:
    """Return the option as a user writes it."""
    return declared.flag or f"--{declared.name.replace('_', '-')}"


def format_value(text: Any) -> str:
    """Return text written by :meth:`Option.text_of` as a user types it."""
    return NONE if text is None else " ".join(text) if isinstance(text, list) else str(text)


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
    """Read a whole number of 1 or more."""
    return int(_number(_without_zeros(text), int, 1, 2**62, "a whole number of 1 or more"))


def _without_zeros(text: str) -> str:
    """Return ``3`` for ``3.0``, as Hugging Face's users write a number of epochs."""
    return re.sub(r"(?<=\d)\.0+$", "", text)


def batch_size(text: str) -> int:
    """Read a whole number of 1 or more, or a batch that grows; see motley.plan.length."""
    return RampedBatch(text) if ":" in text else positive(text)


def steps_or_time(text: str) -> int | Duration:
    """Read a whole number of 1 or more, or a time, as 10m."""
    if (seconds := parse_seconds(text)) is not None:
        return Duration(text, seconds)
    says = "a number of steps of 1 or more, or a time, as 90s, 10m or 1h30m"
    return int(_number(text, int, 1, 2**62, says))


def natural(text: str) -> int:
    """Read a whole number of 0 or more."""
    return int(_number(text, int, 0, 2**62, "a whole number of 0 or more"))


def not_negative(text: str) -> float:
    """Read a number of 0 or more."""
    return _number(text, float, 0.0, 1e300, "a number of 0 or more")


def above_zero(text: str) -> float:
    """Read a number above 0."""
    return _number(text, float, 1e-300, 1e300, "a number above 0")


def fraction(text: str) -> float:
    """Read a number from 0 to 1."""
    return _number(text, float, 0.0, 1.0, "a number from 0 to 1")


def names(text: str) -> tuple[str, ...]:
    """Read words between commas."""
    return tuple(text.split(","))


def naturals(text: str) -> tuple[int, ...]:
    """Read whole numbers of 0 or more, between commas."""
    return tuple(natural(word) for word in text.split(","))


def positives(text: str) -> tuple[int, ...]:
    """Read whole numbers of 1 or more, between commas."""
    return tuple(positive(word) for word in text.split(","))


def step_span(text: str) -> StepSpan:
    """Read two numbers of steps, as 20:40; the second is not among them."""
    first, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not two steps with a colon, as 20:40")
    span = StepSpan(natural(first), natural(end))
    if span.first >= span.end:
        raise argparse.ArgumentTypeError(f"{text} has no step; the second number is to be larger")
    return span


def profiled(text: str) -> str | tuple[int, ...]:
    """Read ``slowest``, ``all``, or ranks between commas."""
    return text if text in (SLOWEST, ALL) else naturals(text)
