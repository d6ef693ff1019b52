"""Train any model on all ranks: with torch.distributed, or with DeepSpeed where --stage is given.

    mpirun -np 5 --hostfile hosts.txt motley train --task text --epochs 2
    mpirun -np 5 --hostfile hosts.txt motley train --task mine.py --strategy fsdp
    mpirun -np 5 --hostfile hosts.txt motley train --task mine.py --stage 3
    mpirun -np 5 --hostfile hosts.txt motley train --resume auto

Options of a task are listed with --task NAME --help-all.
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
    """Train as the command line asks."""
    _train(str(__doc__), sys.argv[1:])


def train_model(
    task: Task | type[Task] | str = USUAL,
    *,
    arguments: Sequence[str] | None = None,
    **options: Any,
) -> Path:
    """Train a task on all ranks, as ``motley train`` does; every rank calls it once.

    Start the script with ``mpirun -np 2 motley run SCRIPT.py``, or with ``python SCRIPT.py`` for
    one rank::

        @dataclass
        class Lines(motley.Task): ...


        if __name__ == "__main__":
            folder = motley.train_model(Lines(width=128), epochs=5, lr=3e-4)

    Args:
        task: a task, its class, a built-in one's name, or a Python file with one. Each rank makes
            it again from the same options, so its class is defined in a file.
        arguments: words of the command line, by default those of this process. They count more
            than ``options``, and these more than a file of ``--config``. ``--resume auto`` among
            them continues an interrupted run.
        options: of ``motley train``, with underscores: ``batch_size=256``, ``shares=[5, 3]``,
            ``stage=3``.

    Returns:
        The folder of the run's records, which :func:`motley.records.load` reads. Rank 0 completes
        them last.

    A wrong option ends the process with status 2 and a line that names it. A failure in training
    ends all ranks.
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
    """Train as the command line asks; return the folder of the records.

    Args:
        package: whose strategies are known: motley.engines.strategies.TORCH or ZERO.
        description: the script's docstring, which holds the examples.
        words: the command line; None: this process's.
    """
    strategies = known_strategies(package)
    config = read_config(training_parser(description, strategies), words)
    # Torch after the command line, so that -h and a wrong option are answered at once; and before
    # run(), which sets aside from Python's search for garbage what was imported by then.
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
    """Return TORCH, or ZERO where an option of DeepSpeed is among the words."""
    names = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words}
    return ZERO if _OF_ZERO & names else TORCH


def _named_in_file(words: Sequence[str]) -> set[str]:
    """Return the options of the file that ``--config`` names."""
    try:
        path, _ = split_config(words)
        return set(ConfigFile.read(path).values) if path else set()
    except MotleyError:  # which reading the command line says better
        return set()
