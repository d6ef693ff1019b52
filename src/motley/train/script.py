"""What a training script does: its folder says through which package, its options all else."""

from collections.abc import Mapping

from motley.checkpoint.resume import read_saved_options
from motley.checkpoint.run import Run
from motley.config.options import Config
from motley.engines.strategy import Strategy, chosen_strategy, engines_of, known_strategies
from motley.launch.world import World, run
from motley.train.command_line import (
    list_different_options,
    read_config,
    restore_options,
    training_parser,
)
from motley.train.start import train


def train_script(package: str, description: str) -> None:
    """Train as the command line asks.

    Args:
        package: whose strategies are known: motley.engines.strategy.TORCH or ZERO.
        description: the script's docstring, which holds the examples.
    """
    strategies = known_strategies(package)
    config = read_config(training_parser(description, strategies))
    run(
        lambda world: _train(world, config, strategies),
        packages=chosen_strategy(config, strategies).packages,
    )


def _train(world: World, given: Config, strategies: Mapping[str, Strategy]) -> None:
    """Train with the options of the checkpoint that is continued, unless the user typed others."""
    found, config = Run.find(world, given), given
    saved = world.from_first(lambda: read_saved_options(found.resume_from))
    if saved is not None:
        config = restore_options(given, saved)
        taken = ", ".join(list_different_options(config, given))
        if taken and world.rank == 0:
            print(f"options of the checkpoint: {taken}", flush=True)
    train(world, config, engines_of(config, strategies), run=found)
