"""The plan from measurements: the hosts that train, the samples of each rank, and the wire mode.

The wire mode is the form in which gradients travel between ranks. The ranks time the micro-batch
sizes of the plan. Faster alternatives become advice to the user.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from motley.checkpoint.run import Run
from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.launch.world import World
from motley.measure.compile_trial import compile_where_faster
from motley.measure.device import has_room
from motley.measure.link_speed import Traffic
from motley.measure.process_group import ProcessGroup, shrink_group
from motley.measure.profile import (
    Measured,
    can_overlap,
    equalise_speeds,
    may_take,
    measure_between,
    measure_speeds,
    measure_wires,
)
from motley.measure.speed_cache import WireMemory, recall, remember, wire_cache, with_sizes
from motley.plan.advice import (
    Advice,
    better_engine,
    better_modes,
    bound_by_input,
    fewer_hosts,
    larger_batch,
)
from motley.plan.forecast import WORTH_IT, Choice, Forecast, choose_machines, split_and_forecast
from motley.plan.memory import Foreseen
from motley.plan.plan import Plan, cut, make_plan
from motley.plan.speeds import Links, SpeedTable
from motley.plan.wire import AllReduceCost, EngineTraits, WireMode
from motley.tasks.builtin import get_task
from motley.tasks.model import TaskModel


def faster(
    world: World,
    group: ProcessGroup,
    config: Config,
    measured: Measured,
    options: Mapping[WireMode, Choice],
    mode: WireMode,
) -> tuple[Advice, ...]:
    """Return advice on faster wire modes, fewer hosts and larger batches.

    Args:
        world: the ranks.
        group: process group of the ranks that could train.
        config: the options.
        measured: measurements of these ranks.
        options: for each wire mode, the ranks that should train.
        mode: the chosen wire mode.
    """
    names, machines = [worker.host for worker in group.workers], group.machines(world)
    advice = better_modes(options, mode, names)
    job = config.batch_size, machines, measured.speeds
    ring = measured.wires.get(replace(mode, slow_rank=None), measured.wires[EXACT])
    if config.hosts != "auto":
        fewer = choose_machines(*job, ring, measured.links, world.machines[0])
        planned_s = options[mode].chosen.step_s
        advice += fewer_hosts(fewer, planned_s, names, machines, measured.links)
    if mode.slow_rank is None:
        advice += larger_batch(config.batch_size, names, *job[1:], ring, measured.links)
    return advice


def other_engines(
    world: World,
    group: ProcessGroup,
    global_batch: int,
    measured: Measured,
    mode: WireMode,
    traits: EngineTraits,
) -> dict[str, Forecast]:
    """Return forecasts for other engines, by the options that select them."""
    wire, exact = measured.wires[mode], measured.wires.get(EXACT)
    wire = replace(wire, overlaps=can_overlap(world, group, mode, wire))
    through = {
        name: other.through(wire, mode, group.precisions, exact)
        for name, other in traits.others.items() if other.can(mode)
    }  # fmt: skip
    return {
        name: split_and_forecast(global_batch, measured.speeds, sent)[2]
        for name, sent in through.items()
    }


_ROUNDS = 4  # largest number of rounds of timing and splitting
_SHOWS = 0.02  # part of a step from which a wire counts as not hidden


def refine(
    world: World,
    group: ProcessGroup,
    model: TaskModel | None,
    global_batch: int,
    measured: Measured,
    mode: WireMode = EXACT,
    most: int | None = None,
) -> Measured:
    """Time the micro-batch sizes of the split, and split the batch again, a few times.

    A GPU computes a matrix product in waves of tiles. One more image can need a whole wave more (8
    % of the time on an H200). Interpolation between powers of two does not show this. If the
    all-reduce takes a considerable part of the step, a whole share in one micro-batch is timed too,
    because a longer last backward pass hides more of the all-reduce. If the engine communicates in
    each micro-batch, the largest size that memory and ``most`` allow is timed too. Every launched
    rank calls this function.

    Args:
        world: the ranks.
        group: process group of the ranks.
        model: the model; None on a rank that is left out.
        global_batch: samples in a step.
        measured: measurements so far.
        mode: the wire mode of the split.
        most: largest number of samples in a micro-batch of this rank; None: as many as fit in
            memory.
    """
    for _ in range(_ROUNDS):
        wire = measured.wires[mode]
        speeds, counts, predicted = split_and_forecast(global_batch, measured.speeds, wire)
        shows = wire.likes_long_batches and predicted.exposed_s > _SHOWS * predicted.step_s
        speed = None
        if model is not None and group.rank is not None:
            own, gpu = counts[group.rank], bool(group.workers[group.rank].uuid)
            speed, sizes = measured.speeds[group.rank], tuple[int, ...]()
            if gpu:
                grain, m = speed.grain, speeds[group.rank].micro_batch
                sizes = tuple(grain * groups for groups in cut(own // grain, m // grain))
            speed = with_sizes(model, speed, sizes)
            if shows:
                speed = _with_long(model, speed, own, most, wire)
        result = tuple(each for each in world.allgather(speed) if each is not None)
        if result == measured.speeds:
            break
        measured = replace(measured, speeds=result)
    return measured


def _with_long(
    model: TaskModel, speed: SpeedTable, own: int, most: int | None, wire: AllReduceCost
) -> SpeedTable:
    """Return the speed with one more timed size: the largest useful micro-batch of the share.

    Args:
        model: the model.
        speed: speed of this rank.
        own: samples that this rank takes in a step.
        most: largest number of samples in a micro-batch; None: only memory limits the size.
        wire: cost of an all-reduce.
    """
    is_cpu = next(model.parameters()).device.type == "cpu"
    each_sends = wire.allreduces_per_micro_step > 0
    for size in _sizes_of_like_parts(own, speed.grain, min(own, most or own)):
        # A processor's time is on a straight line between the sizes that were timed.
        if size in speed.sizes or (is_cpu and size <= speed.sizes[-1]):
            return speed
        if has_room(model, speed, size) and (size == own or each_sends):
            speed = with_sizes(model, speed, (size,))
            if size in speed.sizes:
                break
        if is_cpu or not each_sends:  # a trial cannot find what fits in a CPU's memory
            break
    return speed


def _sizes_of_like_parts(count: int, grain: int, limit: int) -> list[int]:
    """Return the sizes of micro-batches into which ``count`` samples can be cut evenly.

    For each possible number of nearly equal parts of at most ``limit`` samples, the result contains
    the size of the larger parts. The sizes descend.
    """
    groups, most = count // grain, limit // grain
    parts = range(-(-groups // most), groups + 1) if most else ()
    return list(dict.fromkeys(grain * -(-groups // each) for each in parts))


@dataclass(frozen=True)
class Planned:
    """A plan, with the measurements and forecasts from which it was made.

    Attributes:
        plan: the plan.
        speeds: measured speed of each rank; empty for a plan made by hand.
        forecast: expected time of a step; None for a plan made by hand.
        wires: cost of an all-reduce by wire mode; empty for a plan made by hand or of a continued
            run.
        others: forecasts of alternatives with the same batch, by the options that select them.
        advice: faster options for the user; may be empty.
        links: links between all machines, left-out machines included; None if not measured.
        memory: measurements of links and wire modes to store for the next run; None: store nothing.
        foreseen: estimated memory of each rank, if the parameters are sharded; None if each rank
            holds all parameters.
    """

    plan: Plan
    speeds: tuple[SpeedTable, ...] = ()
    forecast: Forecast | None = None
    wires: Mapping[WireMode, AllReduceCost] = field(default_factory=dict)
    others: Mapping[str, Forecast] = field(default_factory=dict)
    advice: tuple[Advice, ...] = ()
    links: Links | None = None
    memory: WireMemory | None = None
    foreseen: Foreseen | None = None

    def is_compiled(self, rank: int, asked: str) -> bool:
        """Return True if a rank's model is compiled, after a trial or by ``--compile``."""
        return self.speeds[rank].compiled if self.speeds else asked == "on"

    def with_note(self, mode: WireMode) -> "Planned":
        """Return the plan with a note on its wire mode's disadvantage as the first advice."""
        text = Advice(f"--wire {mode}: {mode.price}")
        return replace(self, advice=(text, *self.advice))


@dataclass(frozen=True)
class _Job:
    """The ranks, model and options for which a plan is made.

    Attributes:
        world: the ranks.
        run: the run; None: nothing is trained.
        group: process group of the ranks that could train.
        model: the model; None on a rank that is left out.
        config: the options.
        traits: traits of the engine.
        most: largest number of samples in a micro-batch of this rank; None: as many as fit.
    """

    world: World
    run: Run | None
    group: ProcessGroup
    model: TaskModel | None
    config: Config
    traits: EngineTraits
    most: int | None


def measure_and_plan(
    world: World,
    run: Run | None,
    group: ProcessGroup,
    model: TaskModel | None,
    config: Config,
    traits: EngineTraits,
    asked: WireMode | None,
) -> tuple[ProcessGroup, Planned]:
    """Measure speeds and links, and decide which ranks train with how many samples.

    Every launched rank calls this function.

    Args:
        world: the ranks.
        run: the run; None: nothing is trained.
        group: process group of the ranks that could train.
        model: the model; None on a rank that is left out.
        config: the options.
        traits: traits of the engine.
        asked: the wire mode that the user wants; None: auto.

    Returns:
        The ranks that train, and their plan.
    """
    sizes = config.micro_batch.for_ranks(group.size) if config.micro_batch else None
    most = sizes[group.rank] if sizes and group.rank is not None else None
    job = _Job(world, run, group, model, config, traits, most)
    everything, options, mode, memory = _measure(job, asked)
    choice, measured = options[mode], everything
    if len(choice.ranks) < group.size:
        job, measured, mode = _without_others(job, everything, choice, mode)
    world.clock.lap("plan")
    measured = _refined(job, measured, mode)
    world.clock.lap("speeds")
    if sizes is None and group.rank is not None:
        rank = job.group.rank  # None: left out, so its speed was not refined
        own = everything.speeds[group.rank] if rank is None else measured.speeds[rank]
        remember(group, config, traits, own)
    measured, notes = _compiled(job, measured, mode)
    if len(choice.ranks) == group.size and measured.speeds != everything.speeds:
        # Advice compares with the models that will run, some of them compiled.
        everything = replace(everything, speeds=measured.speeds)
        options = _options(job, everything)
    planned = _beside(balance(config.batch_size, measured, mode), options, mode, choice)

    def advise() -> tuple[Advice, ...]:
        assert planned.forecast is not None
        engines = other_engines(world, job.group, config.batch_size, measured, mode, traits)
        names = [worker.host for worker in job.group.workers]
        return (
            *map(Advice, notes),
            *better_engine(traits, planned.forecast, engines),
            *bound_by_input(names, planned.speeds, planned.plan.counts, _reads_images(config)),
            *faster(world, group, config, everything, options, mode),
        )

    return job.group, replace(planned, advice=world.from_first(advise), memory=memory)


def _reads_images(config: Config) -> bool:
    """Return True if the samples are image files in a folder."""
    return getattr(get_task(config), "dataset", "") == "folder"


def _without_others(
    job: _Job, measured: Measured, choice: Choice, mode: WireMode
) -> tuple[_Job, Measured, WireMode]:
    """Return the job, the measurements and the wire mode for the chosen ranks alone."""
    group = shrink_group(job.world, job.group, *_stay(job.world, job.group, measured, choice))
    mode = mode if group.size > 1 else EXACT  # one rank alone sends nothing
    job = replace(job, group=group, model=job.model if group.rank is not None else None)
    job.world.clock.lap("plan")
    wires = measure_wires(job.world, group, job.model, [EXACT, mode], job.traits)
    job.world.clock.lap("wires")
    speeds = tuple(measured.speeds[rank] for rank in choice.ranks)
    return job, Measured(speeds, wires, measured.links), mode


def _refined(job: _Job, measured: Measured, mode: WireMode) -> Measured:
    n = job.config.batch_size
    return refine(job.world, job.group, job.model, n, measured, mode, job.most)


def _compiled(job: _Job, measured: Measured, mode: WireMode) -> tuple[Measured, tuple[str, ...]]:
    """Compile models where this is faster; return the new measurements, and notes for the user."""
    if not (job.traits.compiles or job.config.compile == "on"):
        return measured, ()
    speeds, notes = compile_where_faster(
        job.world, job.run, job.group, job.model, job.config, measured.speeds, measured.wires[mode]
    )
    if speeds != measured.speeds:
        measured = replace(measured, speeds=equalise_speeds(job.group, speeds))
        measured = _refined(job, measured, mode)
    job.world.clock.lap("compile")
    return measured, notes


def _measure(
    job: _Job, asked: WireMode | None
) -> tuple[Measured, dict[WireMode, Choice], WireMode, WireMemory | None]:
    """Measure all inputs of a plan, and choose the ranks and the wire mode.

    Returns:
        Four values: the measurements, the ranks that should train for each wire mode, the chosen
        wire mode, and the measured links and wire modes to store for the next run.
    """
    world, group, model, config, traits = job.world, job.group, job.model, job.config, job.traits
    traffic = Traffic(world.network.interface) if world.first_here else None
    speeds = measure_speeds(world, group, model, config, traits)
    # Figures are only remembered if steps will check them. A plan without a training has no steps,
    # and with local SGD few steps wait for the wire.
    checked = job.run is not None and (asked is None or asked.sync_every == 1)
    cache = wire_cache(world, group, model, asked) if checked else None
    old = recall(world, group, cache) if cache else None
    while True:
        measured = measure_between(world, group, model, config, traits, asked, speeds, traffic, old)
        measured = _limited(measured, config, group)
        options = _options(job, measured)
        mode = _best_mode(options, asked, group.precisions)
        everyone = len(options[mode].ranks) == group.size
        if everyone or old is None:
            break
        old, traffic = None, None  # old figures must not be the reason to leave a machine out
    memory = None
    if cache and everyone and measured.figures:
        memory = WireMemory(cache, measured.figures, old is not None)
    return measured, options, mode, memory


def _limited(measured: Measured, config: Config, group: ProcessGroup) -> Measured:
    """Return the measurements without the micro-batches that exceed ``--micro-batch``."""
    if config.micro_batch is None:
        return measured
    pairs = zip(measured.speeds, config.micro_batch.for_ranks(group.size), strict=True)
    return replace(measured, speeds=tuple(speed.at_most(size) for speed, size in pairs))


def _beside(
    planned: Planned, options: Mapping[WireMode, Choice], mode: WireMode, choice: Choice
) -> Planned:
    """Return the plan with forecasts of its alternatives, and with the ideal step of all machines.

    In the ideal step, no rank waits and no data is sent. All machines take part, including left-out
    machines.
    """
    others = {
        f"--wire {other}": result.chosen for other, result in options.items() if other != mode
    }
    forecast = planned.forecast
    assert forecast is not None
    if len(choice.ranks) < len(choice.with_all.compute_s):
        others["--hosts all"] = choice.with_all
        forecast = replace(forecast, limit_s=choice.with_all.limit_s)
    return replace(planned, forecast=forecast, others=others)


def _options(job: _Job, measured: Measured) -> dict[WireMode, Choice]:
    """Return, for each measured wire mode, the ranks that should train.

    Only rank 0 computes the result, because ranks may share processors.
    """
    world, config, machines = job.world, job.config, job.group.machines(job.world)
    # The first rank that trains reads and writes checkpoints, and MASTER_ADDR is its host.
    free = (job.run is None or job.run.is_shared()) and not world.has_fixed_master()
    needed = None if free else world.machines[0]

    def choose() -> dict[WireMode, Choice]:
        return {
            mode: choose_machines(
                config.batch_size, machines, measured.speeds, wire, measured.links, needed,
                fixed=config.hosts != "auto" or mode.slow_rank is not None,
            )
            for mode, wire in measured.wires.items()
        }  # fmt: skip

    return world.from_first(choose)


def _best_mode(
    options: Mapping[WireMode, Choice], asked: WireMode | None, precisions: Sequence[str]
) -> WireMode:
    """Return the wire mode of a plan.

    Modes are considered in this order: exact, exact with little traffic over a slow link, rounded,
    rounded with little traffic over a slow link. A later mode is chosen only if it is faster by
    more than the error of the clocks.
    """
    best: WireMode | None = None
    for mode in sorted(options, key=lambda m: (not m.is_exact, m.slow_rank is not None)):
        who = [precisions[rank] for rank in options[mode].ranks]  # a rank may round anyway
        if may_take(mode, asked, who) and (
            best is None
            or options[mode].chosen.step_s < (1 - WORTH_IT) * options[best].chosen.step_s
        ):
            best = mode
    return best or EXACT  # one rank alone sends nothing, whatever the user wants


def _stay(
    world: World, group: ProcessGroup, measured: Measured, choice: Choice
) -> tuple[set[int], dict[int, str]]:
    """Return the set of ranks that makes a step shortest, and the reasons to leave out others."""
    stay = [group.workers[rank] for rank in choice.ranks]
    hosts = ", ".join(dict.fromkeys(worker.host for worker in stay))
    slower = (
        f"a step would take {choice.with_all.step_s:.3g} s with all hosts, and "
        f"{choice.chosen.step_s:.3g} s with {hosts} alone"
    )

    def reason(rank: int) -> str:
        machine = world.machines[group.workers[rank].rank]
        link = measured.links.remark(machine) if measured.links else ""
        why = "its share would be less than one sample" if rank in choice.idle else slower
        return f"{link}{': ' if link else ''}{why}; --hosts all keeps all"

    reasons = {worker.rank: reason(rank) for rank, worker in enumerate(group.workers)}
    return {worker.rank for worker in stay}, reasons


def balance(global_batch: int, measured: Measured, mode: WireMode = EXACT) -> Planned:
    """Return a plan whose shares follow the measured speeds, with its forecast."""
    wire = measured.wires[mode]
    speeds, counts, predicted = split_and_forecast(global_batch, measured.speeds, wire)
    sizes = [speed.micro_batch for speed in speeds]
    plan = make_plan(global_batch, counts, sizes, mode, predicted.buckets, measured.speeds[0].grain)
    return Planned(plan, speeds, predicted, measured.wires, links=measured.links)
