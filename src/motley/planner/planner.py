"""Makes the plan: from ``--shares``, from the run that is continued, or from measured speeds."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from motley.checkpoint.run import Run
from motley.comm.modes import parse_wire
from motley.comm.modes.numbers import EXACT
from motley.config.option import Decides
from motley.config.options import Config
from motley.errors import MotleyError
from motley.launch.world import World
from motley.plan.advice import better_engine, better_modes, larger_batch
from motley.plan.engine_traits import EngineTraits
from motley.plan.forecast import WORTH_IT, Choice, Forecast, arrange, choose_machines
from motley.plan.links import Links
from motley.plan.plan import Plan, make_plan, whole_shares
from motley.plan.split import SpeedTable
from motley.plan.wire import AllReduceCost, WireMode
from motley.planner.parts import Parts
from motley.planner.process_group import ProcessGroup, kept_workers, shrink_group
from motley.planner.profile import Measured, can_overlap, measure_team, refine, wires_of
from motley.planner.speed_cache import remember
from motley.tasks.model import (
    Classifier,
)


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from.

    Attributes:
        speeds: of each rank, measured; empty for a plan made by hand.
        forecast: None for a plan made by hand.
        wires: by what travels; none for a plan made by hand, or for that of a continued run.
        others: what else could be done with the same batch, by the options for it.
        advice: what would be better than what was chosen, for the user; may be empty.
        links: between the machines, those left out included; None where not measured.
    """

    plan: Plan
    speeds: tuple[SpeedTable, ...] = ()
    forecast: Forecast | None = None
    wires: Mapping[WireMode, AllReduceCost] = field(default_factory=dict)
    others: Mapping[str, Forecast] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    links: Links | None = None

    def with_note(self, mode: WireMode) -> "Planned":
        """The same, with what a wire mode costs said first."""
        return replace(self, advice=(f"--wire {mode}: {mode.price}", *self.advice))


def plan_batch(
    world: World,
    run: Run | None,
    group: ProcessGroup,
    parts: Parts | None,
    config: Config,
    traits: EngineTraits | None = None,
) -> tuple[ProcessGroup, Planned]:
    """Who does how much of every global batch. Every launched rank calls it.

    Args:
        run: may be a continued one; None if nothing is to be trained.
        parts: None on a rank that is left out.
        traits: what the engine can; None: all.

    Returns:
        Those who train, all or without hosts that make a step longer; and their plan.
    """
    traits = traits or EngineTraits()
    named = config.wire
    asked = named and named.in_job(group.precisions)
    _check_engine(asked, group, traits)
    if config.shares is not None:
        shares = config.shares.of(group.size)
        sizes = (
            config.micro_batch.of(group.size)
            if config.micro_batch
            else whole_shares(config.batch_size, shares)
        )
        mode = asked if asked is not None and group.size > 1 else EXACT
        planned = Planned(make_plan(config.batch_size, shares, sizes, mode))
    elif run is not None and (before := _plan_before(world, run, group, config, traits)):
        group, planned = before
    else:
        equal = (1.0,) * group.size
        make_plan(config.batch_size, equal, (1,) * group.size, EXACT)  # refuses a small batch
        model = parts.model if parts else None
        group, planned = _measure_and_plan(world, run, group, model, config, traits, asked)
    if (taken := planned.plan.wire).is_inexact:
        planned = planned.with_note(taken)
    elif named is not None and named != asked and not named.is_inexact:
        planned = planned.with_note(named)
    return group, planned


def _check_engine(asked: WireMode | None, group: ProcessGroup, traits: EngineTraits) -> None:
    """MotleyError if the engine cannot do these ranks, or it or they what ``--wire`` asks for."""
    if group.is_mixed and not traits.mixed:
        raise MotleyError(
            f"{traits.words}; GPUs and CPUs together cannot. Leave out one kind with --hosts, or "
            "train with torch_dist/train_vit.py --strategy ddp"
        )
    if asked is not None and not traits.can(asked):
        raise MotleyError(
            f"--wire {asked}: {traits.words}, as they are or rounded, in a ring; choose exact, "
            "bf16 or fp16, or train with torch_dist/train_vit.py --strategy ddp"
        )
    if asked is not None and group.is_mixed and not asked.mixes_devices:
        raise MotleyError(
            f"--wire {asked} is not for GPUs and CPUs together; choose exact, bf16 or fp16, or "
            "leave out one kind with --hosts"
        )
    if asked is not None and asked.slow_rank is not None and not asked.slow_rank < group.size > 2:
        raise MotleyError(
            f"--wire {asked}: {group.size} ranks take part; /leafK spares rank K, from 0, of 3 or "
            "more; leave it to the plan with --wire exact"
        )


def _measure_and_plan(
    world: World,
    run: Run | None,
    group: ProcessGroup,
    model: Classifier | None,
    config: Config,
    traits: EngineTraits,
    asked: WireMode | None,
) -> tuple[ProcessGroup, Planned]:
    """See :func:`plan_batch`; where nobody has said who takes how much."""
    measured = measure_team(world, group, model, config, traits, asked)
    most = None  # samples in a micro-batch of this rank
    if config.micro_batch is not None:
        sizes = config.micro_batch.of(group.size)
        pairs = zip(measured.speeds, sizes, strict=True)
        measured = replace(measured, speeds=tuple(speed.at_most(size) for speed, size in pairs))
        most = None if group.rank is None else sizes[group.rank]
    everyone, everything = group, measured
    own = None if group.rank is None else measured.speeds[group.rank]
    options = _options(world, run, group, config, measured)
    mode = _best_mode(options, asked, group.precisions)
    choice = options[mode]
    if len(choice.ranks) < group.size:
        group = shrink_group(world, group, *_stay(world, group, measured, choice))
        model = model if group.rank is not None else None
        mode = mode if group.size > 1 else EXACT  # one rank alone sends nothing
        wires = wires_of(world, group, model, [EXACT, mode], traits)
        speeds = tuple(measured.speeds[rank] for rank in choice.ranks)
        measured = Measured(speeds, wires, measured.links)
    measured = refine(world, group, model, config.batch_size, measured, mode, most)
    if config.micro_batch is None and own is not None:
        remember(
            everyone, config, traits, own if group.rank is None else measured.speeds[group.rank]
        )
    planned = balance(config.batch_size, measured, mode)
    engines = _other_engines(world, group, config.batch_size, measured, mode, traits)
    others = {f"--wire {other}": found.chosen for other, found in options.items() if other != mode}
    forecast = planned.forecast
    assert forecast is not None
    if len(choice.ranks) < everyone.size:
        others["--hosts all"] = choice.whole
        # The limit is what all machines can do, those that are left out too.
        forecast = replace(forecast, limit_s=choice.whole.limit_s)
    names = [worker.host for worker in everyone.workers]
    machines = everyone.machines(world)
    ring = everything.wires.get(mode, everything.wires[EXACT])
    advice = better_engine(traits, forecast, engines)
    advice += better_modes(options, mode, names)
    if mode.slow_rank is None:
        advice += larger_batch(
            config.batch_size, names, machines, everything.speeds, ring, everything.links
        )
    return group, replace(planned, forecast=forecast, others=others, advice=advice)


def _other_engines(
    world: World,
    group: ProcessGroup,
    global_batch: int,
    measured: Measured,
    mode: WireMode,
    traits: EngineTraits,
) -> dict[str, Forecast]:
    """The same through engines that send otherwise, by what a user writes to have them."""
    wire = measured.wires[mode]
    wire = replace(wire, overlaps=can_overlap(world, group, mode, wire))
    return {
        name: arrange(global_batch, measured.speeds, other.through(wire, mode))[2]
        for name, other in traits.others.items()
        if other.can(mode)
    }


def _options(
    world: World, run: Run | None, group: ProcessGroup, config: Config, measured: Measured
) -> dict[WireMode, Choice]:
    """Who should train, by what travels."""
    machines = group.machines(world)
    # Who trains first reads and writes checkpoints, and is where MASTER_ADDR is.
    free = (run is None or run.is_shared()) and not world.has_fixed_master()
    needed = None if free else world.machines[0]
    return {
        mode: choose_machines(
            config.batch_size, machines, measured.speeds, wire, measured.links, needed,
            fixed=config.hosts != "auto" or mode.slow_rank is not None,
        )
        for mode, wire in measured.wires.items()
    }  # fmt: skip


def _best_mode(
    options: Mapping[WireMode, Choice], asked: WireMode | None, precisions: Sequence[str]
) -> WireMode:
    """Of the modes that the plan may take the one that changes least, or what is faster than that
    by more than clocks err: exact, with a slow link spared, rounded, both."""
    best: WireMode | None = None
    for mode in sorted(options, key=lambda m: (not m.is_exact, m.slow_rank is not None)):
        who = [precisions[rank] for rank in options[mode].ranks]  # they round anyway, or not
        if _may_take(mode, asked, who) and (
            best is None
            or options[mode].chosen.step_s < (1 - WORTH_IT) * options[best].chosen.step_s
        ):
            best = mode
    return best or EXACT  # one rank alone sends nothing, whatever was asked for


def _may_take(mode: WireMode, asked: WireMode | None, precisions: Collection[str]) -> bool:
    """Whether a plan may take a mode: what was asked for; else what costs nothing. Whether it
    spares a slow link is the plan's to say.

    Args:
        precisions: of those who would train.
    """
    if asked is None:
        return mode.is_free(precisions)
    return mode == asked or asked == replace(mode, slow_rank=None)


def _stay(
    world: World, group: ProcessGroup, measured: Measured, choice: Choice
) -> tuple[set[int], dict[int, str]]:
    """The launched ranks that train if a step is to be short; and why each other is left out."""
    stay = [group.workers[rank] for rank in choice.ranks]
    hosts = ", ".join(dict.fromkeys(worker.host for worker in stay))
    slower = (
        f"with all a step would take {choice.whole.step_s:.3g} s, with {hosts} alone "
        f"{choice.chosen.step_s:.3g} s"
    )

    def reason(rank: int) -> str:
        machine = world.machines[group.workers[rank].rank]
        link = measured.links.remark(machine) if measured.links else ""
        why = "the share would be less than a sample" if rank in choice.idle else slower
        return f"{link}{': ' if link else ''}{why}; --hosts all keeps all"

    reasons = {worker.rank: reason(rank) for rank, worker in enumerate(group.workers)}
    return {worker.rank for worker in stay}, reasons


def balance(global_batch: int, measured: Measured, mode: WireMode = EXACT) -> Planned:
    """Shares by measured speed, and what to expect of them."""
    wire = measured.wires[mode]
    speeds, counts, predicted = arrange(global_batch, measured.speeds, wire)
    sizes = [speed.micro_batch for speed in speeds]
    plan = make_plan(global_batch, counts, sizes, mode, predicted.buckets)
    return Planned(plan, speeds, predicted, measured.wires, links=measured.links)


def _plan_before(
    world: World, run: Run, group: ProcessGroup, config: Config, traits: EngineTraits
) -> tuple[ProcessGroup, Planned] | None:
    """The first plan of the run that is continued, if ranks and engine are unchanged, so that the
    resume is bit-exact; a run that changed its plan on the way does not resume so."""
    content = world.from_first(run.read_continued)
    old: dict[str, Any] = content.get("config", {})
    ranks: list[dict[str, Any]] = content.get("ranks", [])
    left_out: list[dict[str, Any]] = content.get("left_out", [])
    kept = {rank["rank"] for rank in ranks}
    workers = kept_workers(group.workers, kept)
    started = kept | {rank["rank"] for rank in left_out} == set(range(world.size))
    if not ranks or not started or ranks != [asdict(worker) for worker in workers]:
        return None
    same = config.as_json(Decides.SPEED | Decides.PLAN)
    del same["img_size"]  # recorded as it is, not as it was asked for
    if any(old.get(key) != value for key, value in same.items()):
        return None
    plan = content["plan"]
    wire = parse_wire(plan.get("wire", "auto"))
    if wire is None or plan.get("overlaps") != traits.overlaps:  # or of an older version
        return None
    if plan.get("sends") != traits.numbers:
        return None
    speeds = [SpeedTable.from_json(each) for each in plan["speeds"]]
    known = plan["forecast"] and Forecast.from_json(plan["forecast"])
    if len(workers) < group.size:
        reasons = {entry["rank"]: entry["reason"] for entry in left_out}
        group = shrink_group(world, group, kept, reasons)
    made = make_plan(
        plan["global_batch"], plan["shares"], plan["max_micro_batch"], wire, plan["buckets"]
    )
    return group, Planned(made, tuple(speeds), known)
