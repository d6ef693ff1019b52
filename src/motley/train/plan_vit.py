"""Show how a step would be split among the ranks, and how fast the step would be.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/plan_vit.py
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/plan_vit.py --batch-size 512

The command trains nothing. The options are those of train_vit.py, without --strategy and --offload.
The command measures each rank's speed and the time of one all-reduce. Measured speeds are stored
for later runs. Then the command splits the batch, and predicts the speed of this split and of
other splits.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from motley.errors import MotleyError
from motley.launch.process import stop_usage
from motley.launch.world import run
from motley.tasks.builtin import USUAL
from motley.tasks.task import Task
from motley.train.command_line import (
    check_call,
    make_words,
    read_config,
    training_parser,
)

if TYPE_CHECKING:
    from motley.measure.measured_plan import Planned


def main() -> None:
    """Show the plan for the options on the command line."""
    config = read_config(training_parser(str(__doc__)))
    from motley.train.summary import show_plan  # see motley.train.train_model.train_script

    run(lambda world: show_plan(world, config))


def plan_shares(
    task: Task | type[Task] | str = USUAL,
    *,
    arguments: Sequence[str] | None = None,
    **options: Any,
) -> "Planned":
    """Measure all ranks, and plan how many samples of a step each rank computes.

    The function trains nothing.

    Every rank of ``mpirun -np 2 motley run SCRIPT.py`` calls it once::

        planned = motley.plan_shares("text", batch_size=512)
        print(planned.plan.counts, planned.forecast.step_s, *planned.advice)

    Args:
        task: as in :func:`motley.train_model`.
        arguments: as in :func:`motley.train_model`.
        **options: as in :func:`motley.train_model`, without ``shares``.

    Returns:
        The plan. Its ``plan.counts`` is the number of samples of each rank, ``forecast.step_s`` the
        seconds per step, ``forecast.samples_per_s`` the speed, and ``advice`` a list of sentences.

    A wrong option ends the process with status 2 and a line that names the option.
    """
    check_call("plan_shares")
    try:
        words = make_words(task, options, None)
    except MotleyError as error:
        stop_usage(str(error))
    typed = sys.argv[1:] if arguments is None else arguments
    config = read_config(training_parser("", None), [*words, *typed])
    from motley.measure.planner import plan_only

    result: list[Planned] = []
    run(lambda world: result.append(plan_only(world, config)[1]))
    return result[0]
