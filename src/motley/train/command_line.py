"""The options of the training scripts, with all that is registered for them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from motley.comm.modes import modes, parse_wire
from motley.config.option import flag_of, options_of
from motley.config.options import GROUPS, Config
from motley.config.parser import OneVoice, OptionParser
from motley.engines.strategy import Strategy, StrategyOptions
from motley.errors import MotleyError
from motley.tasks.find import USUAL, known_tasks, task_class
from motley.text import did_you_mean


def training_parser(
    description: str, strategies: Mapping[str, Strategy] | None = None
) -> OptionParser:
    """The parser of a training script.

    Args:
        description: the script's docstring, which holds the examples.
        strategies: that the script trains with, by name.
    """
    chosen = strategies or {}
    own = dict.fromkeys(group for each in chosen.values() for group in each.options)
    several = [StrategyOptions] if len(chosen) > 1 else []
    return OptionParser(description, (*several, *own), _registered(chosen))


def config_from(saved: Mapping[str, Any]) -> Config:
    """The options of a run, of those that all scripts have and of its task, as its checkpoint keeps
    them."""
    general: dict[str, Any] = {}
    for group in GROUPS:
        general |= _values(group, saved)
    task = task_class(general.get("task", USUAL))
    return Config(**general, own=(task(**_values(task, saved)),))


def _values(group: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Of the fields of a group, as far as they are saved."""
    registered, found = _registered({}), dict[str, Any]()
    for field, declared in options_of(group).items():
        if declared.name in saved:
            declared = replace(declared, **registered.get(declared.name, {}))
            found[field] = declared.value_of(saved[declared.name])
    return found


def _registered(strategies: Mapping[str, Strategy]) -> dict[str, dict[str, Any]]:
    """What is known of options by what can be added."""
    kinds = modes().values()
    return {
        "task": {
            "says": (
                f"what is learnt: {', '.join(known_tasks())} (default: {USUAL}), or a file with a "
                "task of your own; its options are the last ones here"
            ),
        },
        "wire": {
            "read": parse_wire,
            "metavar": "|".join(("auto", *(kind.usage for kind in kinds))),
            "says": (
                f"how gradients are added up: {'; '.join(kind.says for kind in kinds)}. auto "
                "(default): exact, or 16 bits if that is faster and some rank computes in 16 bits "
                "anyway"
            ),
        },
        "strategy": {
            "choices": tuple(strategies),
            "says": "; ".join(f"{name}{each.says}" for name, each in strategies.items()),
        },
    }  # fmt: skip


def read_config(
    parser: OptionParser, arguments: Sequence[str] | None = None, strict: bool = True
) -> Config:
    """Parse the command line of a training script, the process's own by default.

    Args:
        strict: what no option takes is an error; else it is passed over.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        words = [*add_task(parser, words), *words]
        known, unknown = parser.parse_known_args(words)
        if unknown and strict:
            parser.parse_args(words)  # says what is wrong
        return parser.config_of(known)
    except MotleyError as error:
        parser.error(str(error))


def add_task(parser: OptionParser, arguments: Sequence[str] | None = None) -> list[str]:
    """Have a parser know the options of the task that the command line names.

    Returns:
        The words of ``--recipe``, to be put before the user's.
    """
    first = OneVoice(add_help=False, allow_abbrev=False)
    first.error = parser.error  # type: ignore[method-assign]
    first.add_argument("--task", default=USUAL)
    first.add_argument("--recipe")
    asked = first.parse_known_args(arguments)[0]
    task = task_class(asked.task)
    parser.add_own(task, f"--task {asked.task}")
    parser.elsewhere = {
        flag_of(declared): f"--task {name}"
        for name, other in known_tasks().items() for declared in options_of(other).values()
    }  # fmt: skip
    if asked.recipe is None or not task.recipes:  # then it is an unknown option
        return []
    if asked.recipe not in task.recipes:
        raise MotleyError(
            f"--recipe {asked.recipe} is unknown{did_you_mean(asked.recipe, task.recipes)}; choose "
            f"{', '.join(task.recipes)}"
        )
    return task.recipes[asked.recipe].split()
