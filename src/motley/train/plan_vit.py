"""Say who would do how much of every step, and how fast that would be; nothing is trained.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/plan_vit.py
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/plan_vit.py --batch-size 512

Takes the options of train_vit.py, but for --strategy and --offload. Measures each rank's speed
(remembered between runs) and one all-reduce, splits the batch, and predicts this and other ways
to do it.
"""

import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.errors import MotleyError
from motley.launch.process import stop_usage
from motley.launch.world import World, run
from motley.measure.measured_plan import Planned
from motley.measure.planner import open_model, plan_batch
from motley.measure.process_group import ProcessGroup, join_process_group, leave_process_group
from motley.plan.forecast import what_if
from motley.plan.speeds import Links
from motley.tasks.builtin import USUAL, task_of
from motley.tasks.task import Task
from motley.text import rate_in_words
from motley.train.command_line import (
    check_call,
    make_words,
    read_config,
    training_parser,
)
from motley.train.recorder import console


def main() -> None:
    """Plan as the command line asks."""
    config = read_config(training_parser(str(__doc__)))
    run(lambda world: show_plan(world, config))


def plan_shares(
    task: Task | type[Task] | str = USUAL,
    *,
    arguments: Sequence[str] | None = None,
    **options: Any,
) -> Planned:
    """Measure all ranks and plan who computes how many samples of a step; nothing is trained.

    Every rank of ``mpirun -np 2 motley run SCRIPT.py`` calls it once::

        planned = motley.plan_shares("text", batch_size=512)
        print(planned.plan.counts, planned.forecast.step_s, *planned.advice)

    Args:
        task, arguments, options: as of :func:`motley.train_model`, without ``shares``.

    Returns:
        The plan: ``plan.counts`` samples of each rank, ``forecast.step_s`` seconds a step,
        ``forecast.samples_per_s``, and ``advice`` in words.

    A wrong option ends the process with status 2 and a line that names it.
    """
    check_call("plan_shares")
    try:
        words = make_words(task, options, None)
    except MotleyError as error:
        stop_usage(str(error))
    typed = sys.argv[1:] if arguments is None else arguments
    config, found = read_config(training_parser("", None), [*words, *typed]), list[Planned]()
    run(lambda world: found.append(_plan(world, config)[1]))
    return found[0]


def _plan(world: World, config: Config) -> tuple[ProcessGroup, Planned]:
    """Plan on all ranks."""
    if config.shares is not None:
        raise MotleyError("--shares is a plan already; leave it out to see what would be planned")
    task = task_of(config)
    world.once_per_node(task.prepare)
    group = join_process_group(world, config.precision, config.hosts)
    group, planned = plan_batch(world, None, group, open_model(group, config), config)
    if group.rank is not None:
        leave_process_group()
    return group, planned


def show_plan(world: World, config: Config) -> None:
    """Plan on all ranks, print on rank 0."""
    group, planned = _plan(world, config)
    if world.rank == 0:
        show(group, planned, group.machines(world), task_of(config))


def show(group: ProcessGroup, planned: Planned, machines: Sequence[int], task: Task) -> None:
    """One row a rank, each on one of ``machines``; then one row for each other way."""
    plan, predicted, out = planned.plan, planned.forecast, console()
    assert predicted is not None
    table = Table("rank", "host", "device", "precision", "why", box=None, pad_edge=False)
    for name in ("micro-batch", "samples", "compute", "waits"):
        table.add_column(name, justify="right")
    last = max(predicted.compute_s)
    for worker in group.workers:
        rank = worker.group_rank
        seconds = predicted.compute_s[rank]
        table.add_row(
            str(worker.rank), worker.host, worker.device, worker.precision, worker.why,
            str(plan.max_micro_batch[rank]), str(plan.counts[rank]), f"{seconds:.3g} s",
            f"{last - seconds:.2g} s",
        )  # fmt: skip
    out.print(table)
    for line in group.who_is_left_out():
        out.print(line)
    if planned.links is not None:
        show_links(planned.links)
    out.print(f"\n{predicted.sentence(task.unit, task.weight)}\n")
    for advice in planned.advice:
        out.print(f"{advice}\n")
    if min(plan.counts) < 10 and len(plan.counts) > 1:
        out.print(
            f"the smallest share is {min(plan.counts)} samples, so rounding to whole samples "
            "costs; a larger --batch-size would cost less\n"
        )
    others = Table("or", box=None, pad_edge=False)
    for name in ("s a step", f"{task.unit}/s", "as planned is 1"):
        others.add_column(name, justify="right")
    names = [f"rank {worker.rank} on {worker.host}" for worker in group.workers]
    rows = {f"as planned, --wire {plan.wire}": predicted, **planned.others}
    wire = planned.wires[EXACT]
    rows |= what_if(plan.global_batch, names, machines, planned.speeds, wire, planned.links)
    for label, forecast in rows.items():
        times = forecast.samples_per_s / predicted.samples_per_s
        others.add_row(
            label, f"{forecast.step_s:.3g}", rate_in_words(task.weight * forecast.samples_per_s),
            f"{times:.2f}",
        )  # fmt: skip
    out.print(others)


def show_links(links: Links) -> None:
    """One row a host."""
    table = Table("host", box=None, pad_edge=False)
    for name in ("sends, MB/s", "receives, MB/s", "latency, ms"):
        table.add_column(name, justify="right")
    for machine, host in links.hosts.items():
        table.add_row(
            host, f"{links.sends(machine) / 1e6:,.4g}", f"{links.receives(machine) / 1e6:,.4g}",
            f"{links.latency_s(machine) * 1e3:.2g}",
        )  # fmt: skip
    console().print("")
    console().print(table)
    for line in links.remarks():
        console().print(line)
