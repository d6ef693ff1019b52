"""The modes of ``--wire``, which select the form in which ranks send gradients.

A module in this package adds kinds of modes by listing them in ``MODES``. A kind is a subclass of
motley.plan.wire.WireMode. The subclass defines the spelling of the mode on the command line, the
data that ranks send, the cost, the requirements and the reducer. ``-h``, the planner and the matrix
of runs use all kinds in the list.
"""

import dataclasses
from functools import partial

from motley.errors import MotleyError
from motley.plan.wire import Addition, WireMode
from motley.registry import entries, is_subclass
from motley.text import did_you_mean


def modes() -> dict[str, type[WireMode]]:
    """Return all kinds of ``--wire`` by name. Kinds that require less of an engine come first."""
    order = list(Addition)
    kinds: list[type[WireMode]] = entries(
        __name__, "MODES", partial(is_subclass, kind=WireMode), "subclasses of WireMode", "numbers"
    )
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: order.index(kind.addition))}


def parse_wire(text: str) -> WireMode | None:
    """Return the mode that a value of ``--wire`` names, or None for ``auto``.

    Raises:
        MotleyError: there is no such mode.
    """
    if text == "auto":
        return None
    text, slash, number = text.partition("/leaf")
    if slash:  # the plan writes this form
        mode = parse_wire(text)
        if mode is None or mode.addition is not Addition.NUMBERS or not number.isdecimal():
            raise MotleyError(
                f"--wire {text}{slash}{number}: write the number of a rank after leaf, as in "
                "exact/leaf4"
            )
        return dataclasses.replace(mode, slow_rank=int(number))
    name, colon, number = text.partition(":")
    kinds = modes()
    if name not in kinds:
        raise MotleyError(
            f"--wire {text} is unknown{did_you_mean(name, ('auto', *kinds))}; choose auto, "
            f"{', '.join(kind.usage for kind in kinds.values())}"
        )
    try:
        if colon and kinds[name].usage == name:
            raise ValueError(f"{name} takes no number; write --wire {name}")
        return kinds[name].parse(number)
    except ValueError as error:
        raise MotleyError(f"--wire {text}: {error}") from None
