"""What a training script does: its folder says through which package, its options all else."""

from collections.abc import Mapping

from motley.checkpoint.resume import saved_config
from motley.checkpoint.run import Run
from motley.config.options import Config
from motley.engines.strategy import Strategy, chosen_strategy, engines_of, known_strategies
from motley.launch.world import World, run
from motley.train.command_line import continued, differing_options, read_config, training_parser
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


def _train(world: World, typed: Config, strategies: Mapping[str, Strategy]) -> None:
    """Train with the options of the checkpoint that is continued, unless the user typed others."""
    found, config = Run.find(world, typed), typed
    saved = world.from_first(lambda: saved_config(found.resume_from))
    if saved is not None:
        config = continued(typed, saved)
        taken = ", ".join(differing_options(config, typed))
        if taken and world.rank == 0:
            print(f"options of the checkpoint: {taken}", flush=True)
    train(world, config, engines_of(config, strategies), run=found)
