"""The summary of a run before it starts, for run.json and for the terminal.

The summary has the expected time and the disk space of the checkpoints. The module also prints the
tables that show a plan without training.
"""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.table import Table

from motley.checkpoint.run import Run
from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.errors import MotleyError
from motley.launch.world import World
from motley.live.verdict import run_verdict
from motley.measure.measured_plan import Planned
from motley.measure.planner import plan_only
from motley.measure.process_group import ProcessGroup
from motley.plan.forecast import Forecast, forecast_alternatives
from motley.plan.length import growth, make_ramp
from motley.plan.plan import Plan
from motley.plan.speeds import Links
from motley.plan.wire import EngineTraits
from motley.records.costs import read_training
from motley.tasks.builtin import get_identity, get_task
from motley.tasks.task import Task
from motley.text import format_rate, typed_command
from motley.train.command_line import make_resume_line
from motley.train.recorder import console
from motley.train.setup import Job

_JUDGED = 10  # steps; a shorter run is not judged
_MUCH = 2**24  # bytes of step records


def make_records(
    world: World,
    config: Config,
    group: ProcessGroup,
    plan: Plan,
    planned: Planned,
    traits: EngineTraits,
    job: Job | None,
    last_step: int,
) -> dict[str, Any]:
    """Return the entries of run.json on the ranks, the plan and the options.

    If the speeds of the links come from an earlier run, the entry ``links_of_earlier_run`` is the
    time of their measurement, in seconds since 1970.

    Args:
        world: the ranks.
        config: the options.
        group: process group of the ranks that train.
        plan: the plan in use.
        planned: the plan with its measurements.
        traits: traits of the engine.
        job: the objects of the training; None on a rank that takes no part in training.
        last_step: number of the run's last step.
    """
    task = get_task(config)
    return {
        "config": {**config.as_json(), **get_identity(config)},
        "task": {
            "name": config.task,
            "unit": task.unit,
            "weight": task.weight,
            "title": task.title(),
        },
        "model": job
        and {
            "numbers": job.numbers,
            "trained": job.trained,
            "gradient_bytes": job.gradient_bytes,
        },
        "last_step": last_step,
        "ranks": [worker.as_json() for worker in group.workers],
        "left_out": [entry.as_json() for entry in group.left_out],
        "plan": {
            **dataclasses.asdict(plan),
            "counts": plan.counts,
            "micro_batches": plan.micro_batches,
            "wire": str(plan.wire),
            "overlaps": traits.overlaps,
            "sends": traits.numbers,
            "speeds": [speed.as_json() for speed in planned.speeds],
            "forecast": planned.forecast and planned.forecast.as_json(),
        },
        "memory": planned.foreseen and planned.foreseen.as_json(),
        "advice": [advice.as_json() for advice in planned.advice],
        "links": planned.links and planned.links.as_json(),
        "links_of_earlier_run": _measured_earlier(planned),
        "start": world.clock.as_json(),
        "backend": group.backend,
    }


def print_verdict(run: Run) -> None:
    """Print the speed that a run reached, and faster alternatives. Rank 0 calls it."""
    try:
        files = run.folder.step_files().values()
        is_long = sum(path.stat().st_size for path in files) > _MUCH  # takes seconds to read
        training = read_training(run.folder, last=is_long).last_launch()
    except MotleyError:
        return  # there was no step left to train
    if training is None or len(training.lead) < _JUDGED:
        return
    for sentence in run_verdict(training, co2_per_kwh=None).sentences():
        print(f"  {sentence}")
    report = typed_command("python plots/report.py")
    print(f"  all of it: {report} {shlex.quote(str(run.folder.path))}", flush=True)


def _measured_earlier(planned: Planned) -> float | None:
    """Return the time of an earlier measurement of links, in seconds since 1970.

    None: links were measured at this start.
    """
    memory = planned.memory
    return memory.figures.measured if memory and memory.is_old else None


def _of_two_makers(group: ProcessGroup, predicted: Forecast | None) -> str:
    """Return a sentence on the cost of sending gradients between GPUs of two makers."""
    costs = ""
    if predicted:
        costs = (
            f"; sending takes {predicted.wire_s:.3g} s, of which {predicted.exposed_s:.3g} s of "
            f"each step ({predicted.step_s:.3g} s) are not hidden behind compute"
        )
    return (
        f"{group.kinds} have no communication library in common (NCCL, RCCL), so gradients "
        f"travel through the hosts' memory{costs}"
    )


def print_summary(
    world: World, run: Run, group: ProcessGroup, planned: Planned, plan: Plan, config: Config
) -> None:
    """Print the summary of the run on rank 0: the ranks, their shares, and the forecast."""
    if world.rank != 0:
        return
    predicted = planned.forecast
    for entry in group.left_out:
        run.event("left_out", **entry.as_json())
    task = get_task(config)
    print(task.title())
    if account := task.account:
        print(f"  {account}")
    print(f"  records in {run.folder.path}; if it is stopped: {make_resume_line(run.folder)}")
    for worker in group.workers:
        number = worker.group_rank
        compiled = planned.is_compiled(number, config.compile)
        print(
            f"  rank {worker.rank} on {worker.host}: {worker.device}, {worker.precision} "
            f"({worker.why}), {'compiled, ' if compiled else ''}{plan.sentence(number)}"
            + (f", on {worker.cores}" if worker.cores else "")
            + (f", {predicted.compute_s[number]:.3g} s" if predicted else "")
        )
    for line in group.describe_left_out():
        print(f"  {line}")
    for line in planned.links.remarks() if planned.links else ():
        print(f"  {line}")
    counts = " + ".join(map(str, plan.counts))
    print(f"  a step is {plan.global_batch} samples = {counts}, over {group.backend}, {plan.wire}")
    if len({worker.maker for worker in group.workers if worker.maker}) > 1:
        print(f"  {_of_two_makers(group, predicted)}")
    for line in growth(make_ramp(config.batch_size)):
        print(f"  {line}")
    if predicted:
        print(f"  {predicted.sentence(task.unit, task.weight)}")
    if planned.foreseen:
        print(f"  {planned.foreseen.sentence()}")
    for advice in planned.advice:
        print(f"  {advice}")
    if earlier := _measured_earlier(planned):
        print(
            " the speeds of links and wire modes are from "
            f"{datetime.fromtimestamp(earlier):%Y-%m-%d %H:%M}"
        )
    print(f"  {world.clock.sentence()}")
    sys.stdout.flush()


def show_plan(world: World, config: Config) -> None:
    """Measure and plan on all ranks, and print the plan on rank 0."""
    group, planned = plan_only(world, config)
    if world.rank == 0:
        _show(group, planned, group.machines(world), get_task(config))


def _show(group: ProcessGroup, planned: Planned, machines: Sequence[int], task: Task) -> None:
    """Print a table with a row per rank, and a table with a row per alternative to the plan.

    Args:
        group: process group of the ranks that train.
        planned: the plan.
        machines: number of each rank's machine.
        task: the task.
    """
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
    for line in group.describe_left_out():
        out.print(line)
    if planned.links is not None:
        _show_links(planned.links)
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
    rows |= forecast_alternatives(
        plan.global_batch, names, machines, planned.speeds, wire, planned.links
    )
    for label, forecast in rows.items():
        times = forecast.samples_per_s / predicted.samples_per_s
        others.add_row(
            label, f"{forecast.step_s:.3g}", format_rate(task.weight * forecast.samples_per_s),
            f"{times:.2f}",
        )  # fmt: skip
    out.print(others)


def _show_links(links: Links) -> None:
    """Print a table of the measured links, with a row per host."""
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
