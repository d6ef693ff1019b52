"""How an option is declared: once, with all that others must know of it."""

from dataclasses import dataclass, field, fields
from enum import Flag, auto
from typing import Any, Protocol

_OPTION = "option"  # of a field's metadata


class Decides(Flag):
    """What an option decides; whoever keeps something between runs asks for it here.

    MODEL: what the checkpoint's numbers mean: it cannot be continued with another.
    NUMBERS: what they become: the user hears that a continued run changes there.
    SPEED: how fast a device computes: a remembered speed is of these.
    PLAN: who does how much, besides: a continued run keeps its plan while these stay.
    NOTHING: who computes, how it is kept, how it is shown.
    """

    NOTHING = 0
    MODEL = auto()
    NUMBERS = auto()
    SPEED = auto()
    PLAN = auto()


class Reader(Protocol):
    """Reads what a user wrote; raises argparse.ArgumentTypeError or MotleyError."""

    def __call__(self, text: str, /) -> Any:
        """The value of an option."""


@dataclass(frozen=True)
class Option:
    """What is known of an option, besides its name and default, which are its field's.

    Attributes:
        says: what it does, for ``-h``.
        decides: what depends on it.
        read: its text.
        metavar: what stands for its value in ``-h``. choices: all values; empty: any.
        flag: if not ``--`` and its name. short: another, of one letter.
        bare: its value where it is given without one; None: it needs one.
        unset: how None is written. cell: how a matrix of runs says it, for whose cells it is.
    """

    says: str
    decides: Decides
    read: Reader = str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    flag: str = ""
    short: str = ""
    bare: Any = None
    unset: str | None = None
    cell: str = ""

    def text_of(self, value: Any) -> Any:
        """A value as records and checkpoints keep it: JSON, and texts that :attr:`read` reads."""
        if value is None:
            return self.unset
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return value if isinstance(value, bool | int | float | str) else str(value)

    def value_of(self, text: Any) -> Any:
        """What :meth:`text_of` wrote."""
        return self.read(text) if isinstance(text, str) else text


def option(says: str, decides: Decides, default: Any = None, **known: Any) -> Any:
    """A field of a group of options, which is a frozen dataclass; see Option for ``known``."""
    return field(default=default, metadata={_OPTION: Option(says, decides, **known)})


def options_of(group: type) -> dict[str, Option]:
    """The options of a group by the names of their fields.

    Raises:
        TypeError: a field is declared without what others must know of it.
    """
    found: dict[str, Option] = {}
    for each in fields(group):
        if not isinstance(declared := each.metadata.get(_OPTION), Option):
            raise TypeError(f"{group.__name__}.{each.name} is no option; declare it by option()")
        found[each.name] = declared
    return found


def flag_of(name: str, declared: Option) -> str:
    """As a user writes it."""
    return declared.flag or f"--{name.replace('_', '-')}"
