"""The kinds of ``--strategy``: a file here adds one by listing it under ``STRATEGIES``.

Torch is not imported here, nor by the entries: the matrix and ``-h`` read them too.
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
    """torch.distributed"""

    # Decides nothing by its name: what a plan depends on are the traits.
    strategy: str = option(
        "", Decides.NOTHING, "ddp", cell="strategy", usual="what a rank keeps, default ddp: all",
        per_launch=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Strategy:
    """The parts of the state that each rank keeps, and what travels between ranks.

    Attributes:
        name: as ``--strategy`` takes it. says: the text after its name in ``-h``.
        traits: what its engine can do, known before that is built.
        engine: sets it on a model; imports what it needs itself.
        options: groups of its own, frozen dataclasses.
        script: that trains with it.
        packages: that it needs besides torch, of one release on all hosts.
        cells: names of it in a matrix, and the options for each; None: its name.
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
        """See ``cells``."""
        return {self.name: ("--strategy", self.name)} if self.cells is None else self.cells


@dataclass(frozen=True)
class Engines:
    """Implements EngineFactory: the engines of a strategy, as the options say."""

    traits: EngineTraits
    build: Callable[["TaskModel", "EngineContext"], "Engine"]

    def __call__(self, model: "TaskModel", context: "EngineContext") -> "Engine":
        """Set an engine on a model."""
        return self.build(model, context)


def known_strategies(script: str | None = None) -> dict[str, Strategy]:
    """Return the strategies that a script trains with, by name; None: all."""
    result: list[Strategy] = entries("motley.engines.strategies", "STRATEGIES")
    return {each.name: each for each in result if script in (None, each.script)}


def chosen_strategy(config: Config, strategies: Mapping[str, Strategy]) -> Strategy:
    """Return the strategy that the user has chosen.

    Args:
        config: the options.
        strategies: strategies of the script. If they are more than one, ``--strategy`` names one.
    """
    name = config.group(StrategyOptions).strategy if len(strategies) > 1 else next(iter(strategies))
    return strategies[name]


def list_engines(config: Config, strategies: Mapping[str, Strategy]) -> Engines:
    """Return the engines of :func:`chosen_strategy`."""
    chosen = chosen_strategy(config, strategies)
    for other in strategies.values():
        for group in set(other.options) - set(chosen.options):
            for each in fields(group):
                if getattr(config.group(group), each.name) != each.default:
                    flag = get_flag(get_options(group)[each.name])
                    raise MotleyError(
                        f"{flag} is for --strategy {other.name}, and this is {chosen.name}; add "
                        f"--strategy {other.name}, or leave {flag} out"
                    )
    return Engines(chosen.traits(config), chosen.engine)


def check_offload(what: str, context: "EngineContext") -> None:
    """Raise MotleyError if ``--offload`` has nothing to move."""
    if what != "none" and context.device.type == "cpu":
        raise MotleyError(
            f"--offload {what}: rank {context.rank} computes on the CPU, where all is already"
        )
