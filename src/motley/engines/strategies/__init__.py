"""The strategies that ``--strategy`` can name.

A module in this package adds a strategy by listing it in ``STRATEGIES``. Neither this module nor
its submodules import torch at the top, because ``-h`` and the matrix of runs import these modules,
too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from motley.config.option import Decides, get_flag, get_options, option
from motley.config.options import Config
from motley.errors import MotleyError
from motley.plan.wire import EngineTraits
from motley.registry import entries

if TYPE_CHECKING:
    from motley.engines.protocol import Engine, EngineContext
    from motley.tasks.model import TaskModel

TORCH, ZERO = "torch_dist/train_vit.py", "deepspeed/train_vit.py"


@dataclass(frozen=True)
class StrategyOptions:
    """Options of torch.distributed"""

    # The name decides nothing, because a plan depends on the traits alone.
    strategy: str = option(
        "", Decides.NOTHING, "ddp", cell="strategy", usual="what a rank keeps, default ddp: all",
        per_launch=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Strategy:
    """A strategy: the state that each rank keeps, and the data that ranks exchange.

    Attributes:
        name: value of ``--strategy`` that selects the strategy.
        says: text after the name in ``-h``.
        traits: function that returns the traits of the engine before it is built.
        engine: function that imports its packages, and builds an engine for a model.
        options: frozen dataclasses with the options that only this strategy has.
        script: script that trains with this strategy.
        packages: names of the packages besides torch that the strategy needs. All hosts must have
            the same release of each package.
        cells: options of each variant of the strategy in a matrix of runs, by the variant's name;
            None: one variant.
    """

    name: str
    says: str
    traits: Callable[[Config], EngineTraits]
    engine: Callable[["TaskModel", "EngineContext"], "Engine"]
    options: tuple[type, ...] = ()
    script: str = TORCH
    packages: tuple[str, ...] = ()
    cells: Mapping[str, tuple[str, ...]] | None = None

    def named_cells(self) -> Mapping[str, tuple[str, ...]]:
        """Return the variants of the strategy: ``cells``, or one variant with the strategy's name.

        The values are the command-line options of each variant.
        """
        return {self.name: ("--strategy", self.name)} if self.cells is None else self.cells


@dataclass(frozen=True)
class Engines:
    """The factory of a strategy's engines, for given options.

    Attributes:
        traits: traits of the engines.
        build: function that builds an engine for a model.
    """

    traits: EngineTraits
    build: Callable[["TaskModel", "EngineContext"], "Engine"]

    def __call__(self, model: "TaskModel", context: "EngineContext") -> "Engine":
        """Build and return an engine for a model."""
        return self.build(model, context)


def known_strategies(script: str | None = None) -> dict[str, Strategy]:
    """Return the strategies with which a script can train, by name.

    Args:
        script: name of the script; None: return the strategies of all scripts.
    """
    result: list[Strategy] = entries(
        __name__, "STRATEGIES", lambda item: isinstance(item, Strategy), "Strategy(...)", "ddp"
    )
    return {each.name: each for each in result if script in (None, each.script)}


def chosen_strategy(config: Config, strategies: Mapping[str, Strategy]) -> Strategy:
    """Return the strategy that the user has chosen.

    Args:
        config: the options.
        strategies: strategies of the script. If the script has several strategies, the option
            ``--strategy`` names one of them.
    """
    name = config.group(StrategyOptions).strategy if len(strategies) > 1 else next(iter(strategies))
    return strategies[name]


def list_engines(config: Config, strategies: Mapping[str, Strategy]) -> Engines:
    """Return the factory of the engines of the strategy that the user has chosen.

    Raises:
        MotleyError: an option of another strategy is given.
    """
    chosen = chosen_strategy(config, strategies)
    for other in strategies.values():
        for group in set(other.options) - set(chosen.options):
            for each in fields(group):
                if getattr(config.group(group), each.name) != each.default:
                    flag = get_flag(get_options(group)[each.name])
                    raise MotleyError(
                        f"{flag} belongs to --strategy {other.name}, and this run has --strategy "
                        f"{chosen.name}; add --strategy {other.name}, or leave out {flag}"
                    )
    return Engines(chosen.traits(config), chosen.engine)


def check_offload(what: str, context: "EngineContext") -> None:
    """Raise MotleyError if ``--offload`` is given on a CPU, where all state is in host memory."""
    if what != "none" and context.device.type == "cpu":
        raise MotleyError(
            f"--offload {what}: rank {context.rank} computes on the CPU, so its memory holds "
            "everything already; leave out --offload"
        )
