"""Train any model on all ranks: with torch.distributed, or with DeepSpeed if --stage is given.

    mpirun -np 5 --hostfile hosts.txt motley train --task text --epochs 2
    mpirun -np 5 --hostfile hosts.txt motley train --task mine.py --strategy fsdp
    mpirun -np 5 --hostfile hosts.txt motley train --task mine.py --stage 3
    mpirun -np 5 --hostfile hosts.txt motley train --resume auto

To list the options of a task, add --task NAME --help-all.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motley.config.parser import ConfigFile, split_config
from motley.engines.strategies import TORCH, ZERO, chosen_strategy, known_strategies
from motley.errors import MotleyError
from motley.launch.process import stop_usage
from motley.launch.world import run
from motley.tasks.builtin import USUAL
from motley.tasks.task import Task
from motley.train.command_line import check_call, make_words, read_config, training_parser

_OF_ZERO = {"stage", "deepspeed_config"}


def main() -> None:
    """Train a model with the options on the command line."""
    _train(str(__doc__), sys.argv[1:])


def train_model(
    task: Task | type[Task] | str = USUAL,
    *,
    arguments: Sequence[str] | None = None,
    **options: Any,
) -> Path:
    """Train a task on all ranks, as ``motley train`` does. Every rank calls it once.

    Start the script with ``mpirun -np 2 motley run SCRIPT.py``, or with ``python SCRIPT.py`` for
    one rank::

        @dataclass
        class Lines(motley.Task): ...


        if __name__ == "__main__":
            folder = motley.train_model(Lines(width=128), epochs=5, lr=3e-4)

    Args:
        task: a task, its class, the name of a built-in task, or a Python file that defines a task.
            The class must be defined in a file, because each rank creates the task again from the
            same options.
        arguments: words of the command line; None: the words of this process's command line. These
            words override ``options``, and ``options`` override a file of ``--config``. The words
            ``--resume auto`` continue an interrupted run.
        options: options of ``motley train``, with underscores: ``batch_size=256``, ``shares=[5,
            3]``, ``stage=3``.

    Returns:
        The folder of the run's records, which :func:`motley.records.load` reads. Rank 0 completes
        the records last.

    A wrong option ends the process with status 2 and a line that names the option. A failure in
    training ends all ranks.
    """
    check_call("train_model")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    package = _choose_package([*options, *typed, *_named_in_file(typed)])
    try:
        words = make_words(task, options, package)
    except MotleyError as error:
        stop_usage(str(error))
    description = sys.modules["__main__"].__doc__ or "Train a model on all ranks."
    return _train(description, [*words, *typed])


def train_script(package: str, description: str, words: Sequence[str] | None = None) -> Path:
    """Train with the options on the command line, and return the folder of the records.

    Args:
        package: motley.engines.strategies.TORCH or ZERO, whose strategies the script offers.
        description: the script's docstring, which contains examples for ``-h``.
        words: words of the command line; None: the words of this process's command line.
    """
    strategies = known_strategies(package)
    config = read_config(training_parser(description, strategies), words)
    # Torch is imported after the command line is read, for quick answers to -h and a wrong option.
    # The import comes before run(), which excludes the imported objects from garbage collection.
    from motley.train.start import train_or_continue

    folders = list[Path]()
    run(
        lambda world: folders.append(train_or_continue(world, config, strategies)),
        packages=chosen_strategy(config, strategies).packages,
    )
    return folders[0]


def _train(description: str, words: Sequence[str]) -> Path:
    return train_script(_choose_package([*words, *_named_in_file(words)]), description, words)


def _choose_package(words: Sequence[str]) -> str:
    """Return ZERO if an option of DeepSpeed is among the words, else TORCH."""
    names = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words}
    return ZERO if _OF_ZERO & names else TORCH


def _named_in_file(words: Sequence[str]) -> set[str]:
    """Return the names of the options in the file that ``--config`` names."""
    try:
        path, _ = split_config(words)
        return set(ConfigFile.read(path).values) if path else set()
    except MotleyError:  # read_config() reports the error
        return set()
