"""What a training script does: its folder says through which package, its options all else."""

from motley.engines.strategy import chosen_strategy, engines_of, known_strategies
from motley.launch.world import run
from motley.train.command_line import read_config, training_parser
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
        lambda world: train(world, config, engines_of(config, strategies)),
        packages=chosen_strategy(config, strategies).packages,
    )
