"""The options of the training scripts, with all that is registered for them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from motley.comm.modes import modes, parse_wire
from motley.config.option import options_of
from motley.config.options import GROUPS, Config
from motley.config.parser import OptionParser
from motley.data.dataset import known_datasets
from motley.engines.strategy import Strategy, StrategyOptions
from motley.errors import MotleyError


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
    """The options of a run, of those that all scripts have, as its checkpoint keeps them."""
    registered = _registered({})
    found: dict[str, Any] = {}
    for group in GROUPS:
        for name, declared in options_of(group).items():
            if name in saved:
                declared = replace(declared, **registered.get(name, {}))
                found[name] = declared.value_of(saved[name])
    return Config(**found)


def _registered(strategies: Mapping[str, Strategy]) -> dict[str, dict[str, Any]]:
    """What is known of options by what can be added."""
    datasets, kinds = known_datasets().values(), modes().values()
    return {
        "dataset": {
            "choices": tuple(each.name for each in datasets),
            "says": "; ".join(f"{each.name} {each.says}" for each in datasets),
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


def read_config(parser: OptionParser, arguments: Sequence[str] | None = None) -> Config:
    """Parse the command line of a training script, the process's own by default."""
    try:
        return parser.config_of(parser.parse_args(arguments))
    except MotleyError as error:
        parser.error(str(error))
