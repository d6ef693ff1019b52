"""The declaration of an option, and the readers of its values.

An option is declared once, with all properties that other modules need. Readers convert a user's
text to a value, such as a number within bounds or a list.
"""

import argparse
import ast
import re
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Flag, auto
from types import NoneType, UnionType
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

from motley.errors import MotleyError
from motley.plan.length import RampedBatch
from motley.text import parse_seconds

NONE = "none"  # typed in place of a value: sets an option back to its default, None
_OPTION = "option"  # key in a field's metadata


class Decides(Flag):
    """The effects of an option, for code that stores results between runs.

    MODEL: the option decides the meaning of a checkpoint's tensors. A run cannot be continued with
    another value of the option.
    NUMBERS: the option decides the values of a checkpoint's tensors. A user who changes the option
    in a continued run gets a warning.
    SPEED: the option affects the speed of a device. A stored speed is valid only for the same
    value.
    PLAN: the option affects the split of the work by other means than speeds. A continued run keeps
    its plan only if the value is the same.
    NOTHING: the option has none of these effects. An example is the folder of the records.
    """

    NOTHING = 0
    MODEL = auto()
    NUMBERS = auto()
    SPEED = auto()
    PLAN = auto()


class Reader(Protocol):
    """A function that converts a user's text to the value of an option.

    The function raises argparse.ArgumentTypeError or MotleyError for a text that is not valid.
    """

    def __call__(self, text: str, /) -> Any:
        """Return the value of an option."""


@dataclass(frozen=True)
class Option:
    """The properties of an option. Its name and default are those of its field.

    Attributes:
        says: effect of the option, for ``--help-all``.
        decides: effects of the option; see :class:`Decides`.
        read: function that converts the user's text to the option's value.
        name: name of the option for users and in records, if it differs from the field's name.
        metavar: word that stands for the value in the help text.
        choices: all allowed values; empty: any value that ``read`` accepts.
        flag: flag on the command line, if it is not ``--`` and the name.
        short: additional flag of one letter.
        former: additional flag, which was the option's flag in an earlier version.
        bare: value of the option if no value follows the flag; None: a value must follow.
        several: True if the flag takes one or more words. The option's value is then a tuple.
        unset: text that a user types for the value None.
        cell: name of the option in the definition of a sweep's cells.
        usual: help text in ``-h``; empty: only ``--help-all`` lists the option.
        per_launch: True if the option belongs to one launch, such as the path of the records or the
            shares of ranks. A continued run takes all other options from its checkpoint, unless the
            user types them.
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
        """Return a value in the form that records and checkpoints store.

        The result is a value for JSON. Texts in the result are texts that :attr:`read` reads.
        """
        if value is None:
            return self.unset
        if isinstance(value, tuple):
            return list(map(str, value)) if self.several else ",".join(map(str, value))
        return value if type(value) in (bool, int, float, str) else str(value)

    def from_text(self, text: Any) -> Any:
        """Return the value, given a result of :meth:`to_text`."""
        if isinstance(text, list):
            return tuple(self.read(each) for each in text)
        return self.read(text) if isinstance(text, str) else text


def option(says: str, decides: Decides, default: Any = None, **known: Any) -> Any:
    """Return a dataclass field that declares an option.

    Args:
        says: effect of the option, for ``--help-all``.
        decides: effects of the option; see :class:`Decides`.
        default: default value of the option.
        **known: other attributes of :class:`Option`.
    """
    return field(default=default, metadata={_OPTION: Option(says, decides, **known)})


def get_options(group: type) -> dict[str, Option]:
    """Return the options of a group by the names of their fields, with ``Option.name`` filled in.

    A group is a dataclass whose fields are options. A field may be declared without :func:`option`,
    as in a user's own task. The field's type then selects the function that reads the option, and
    the option is assumed to have all effects of :class:`Decides`.

    Raises:
        MotleyError: a field has a type that options do not support, or has no default.
    """
    result: dict[str, Option] = {}
    for each in fields(group):
        declared = each.metadata.get(_OPTION)
        known = declared if isinstance(declared, Option) else _plain(group, each)
        result[each.name] = replace(known, name=known.name or each.name)
    return result


def _plain(group: type, each: "Field[Any]") -> Option:
    """Return the option for a dataclass field that is declared without :func:`option`."""
    name, hint = f"{group.__name__}.{each.name}", get_type_hints(group)[each.name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    if len(kinds) != 1 or kinds[0] not in (int, float, str, bool):
        raise MotleyError(
            f"{name} has the type {hint}, which an option cannot have; take int, float, str or "
            "bool, or one of these with | None. For a list, take a str such as 1,2, and split it "
            "in the task"
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
    """Return the option's flag as a user writes it, such as ``--batch-size``."""
    return declared.flag or f"--{declared.name.replace('_', '-')}"


def format_value(text: Any) -> str:
    """Return a result of :meth:`Option.to_text` in the form in which a user types it."""
    return NONE if text is None else " ".join(text) if isinstance(text, list) else str(text)


@dataclass(frozen=True)
class Duration:
    """A time in whole seconds, with the text that a user typed for it."""

    text: str
    seconds: int

    def __str__(self) -> str:
        return self.text


MIN, MAX = "min", "max"  # directions of a metric: less is better, or more


@dataclass(frozen=True)
class Metric:
    """The name of a metric, with its better direction if a user has typed one.

    Attributes:
        name: name of the metric in the records of an evaluation.
        direction: ``min`` or ``max``; empty: the task's direction for this metric.
    """

    name: str
    direction: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.direction}" if self.direction else self.name


@dataclass(frozen=True)
class Keyword:
    """An argument of the form ``NAME=TEXT``, as a user typed it."""

    name: str
    text: str

    @property
    def value(self) -> Any:
        """The value: a number, a tuple of numbers, True, False, None, or a text."""
        try:
            return ast.literal_eval(self.text.strip().replace("true", "True"))
        except (ValueError, SyntaxError):
            return self.text

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


class Part(float):
    """A fraction of another number, which a user types in percent."""

    def __str__(self) -> str:
        return f"{100 * float(self):g}%"


SLOWEST, ALL = "slowest", "all"  # ranks to profile


@dataclass(frozen=True)
class StepSpan:
    """A range of steps, from ``first`` to ``end - 1``."""

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
    """Return a number without a decimal part of zeros: ``3`` for ``3.0``.

    Users of Hugging Face's tools write numbers of epochs as ``3.0``.
    """
    return re.sub(r"(?<=\d)\.0+$", "", text)


def batch_size(text: str) -> int:
    """Read a whole number of 1 or more, or a batch ramp such as ``64:512:32/10M``.

    With a ramp, the batch size grows during training; see motley.plan.length.
    """
    return RampedBatch(text) if ":" in text else positive(text)


def steps_or_time(text: str) -> int | Duration:
    """Read a number of steps of 1 or more, or a time such as 10m."""
    if (seconds := parse_seconds(text)) is not None:
        return Duration(text, seconds)
    says = "a number of steps of 1 or more, or a time, as 90s, 10m or 1h30m"
    return int(_number(text, int, 1, 2**62, says))


def metric(text: str) -> Metric:
    """Read the name of a metric, such as loss or accuracy:max."""
    name, colon, direction = text.partition(":")
    if not name or (colon and direction not in (MIN, MAX)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a metric, such as loss, or a metric with {MIN} or {MAX}, as in "
            f"accuracy:{MAX}"
        )
    return Metric(name, direction)


def natural(text: str) -> int:
    """Read a whole number of 0 or more."""
    return int(_number(text, int, 0, 2**62, "a whole number of 0 or more"))


def not_negative(text: str) -> float:
    """Read a number of 0 or more."""
    return _number(text, float, 0.0, 1e300, "a number of 0 or more")


def above_zero(text: str) -> float:
    """Read a number above 0."""
    return _number(text, float, 1e-300, 1e300, "a number above 0")


def rate_or_part(text: str) -> float:
    """Read a number of 0 or more, or a fraction in percent such as 10%."""
    if text.endswith("%"):
        return Part(_number(text[:-1], float, 0.0, 100.0, "a part from 0% to 100%") / 100)
    return not_negative(text)


def keyword(text: str) -> Keyword:
    """Read a named argument, such as eps=1e-8 or betas=0.9,0.95."""
    name, is_joined, value = text.partition("=")
    if not (is_joined and name.isidentifier() and value):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form NAME=VALUE, as in betas=0.9,0.95 or eps=1e-8"
        )
    return Keyword(name, value)


def named_path(text: str) -> Keyword:
    """Read a path with a name for it, such as night=photos/night."""
    name, is_joined, path = text.partition("=")
    if not (is_joined and name.isidentifier() and path):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form NAME=PATH, with a name of letters, digits and _, as in "
            "night=photos/night"
        )
    return Keyword(name, path)


def fraction(text: str) -> float:
    """Read a number from 0 to 1."""
    return _number(text, float, 0.0, 1.0, "a number from 0 to 1")


def noise_part(text: str) -> float:
    """Read a number from 0.01 to 1, the limit of the noise on the learning rate.

    With a limit below 0.01, noise would have to be drawn very often until it is below the limit.
    """
    return _number(text, float, 0.01, 1.0, "a number from 0.01 to 1")


def names(text: str) -> tuple[str, ...]:
    """Read words that are separated by commas."""
    return tuple(text.split(","))


def naturals(text: str) -> tuple[int, ...]:
    """Read whole numbers of 0 or more, separated by commas."""
    return tuple(natural(word) for word in text.split(","))


def positives(text: str) -> tuple[int, ...]:
    """Read whole numbers of 1 or more, separated by commas."""
    return tuple(positive(word) for word in text.split(","))


def step_span(text: str) -> StepSpan:
    """Read a range of steps, such as 20:40. The second number is excluded."""
    first, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not two steps joined by a colon, as in 20:40"
        )
    span = StepSpan(natural(first), natural(end))
    if span.first >= span.end:
        raise argparse.ArgumentTypeError(
            f"{text} contains no step; give a second number that is larger than the first"
        )
    return span


def profiled(text: str) -> str | tuple[int, ...]:
    """Read the ranks to profile: ``slowest``, ``all``, or rank numbers separated by commas."""
    return text if text in (SLOWEST, ALL) else naturals(text)
