"""Makes the plan: from ``--shares``, from the run that is continued, or from measured speeds."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from motley.balance import Speed, split
from motley.data import Images, load_images
from motley.forecast import Forecast, Wire, choose_machines, forecast
from motley.launch import World
from motley.links import Links
from motley.model import Classifier, build_model, image_size, set_matmul_precision
from motley.options import Config
from motley.plan import Plan, make_plan, parse_micro_batches, parse_shares
from motley.runs import Run
from motley.speeds import Measured, measure_team, refine, remember, wire_of
from motley.team import Team, narrow_team, narrowed


@dataclass(frozen=True)
class Parts:
    """What a rank that trains has before there is a plan."""

    images: Images
    model: Classifier


def open_parts(team: Team, config: Config) -> Parts | None:
    """Open the data and build the model; None on a rank that is left out."""
    if team.rank is None:
        return None
    img_size, precision = image_size(config), team.precisions[team.rank]
    set_matmul_precision(precision)
    images = load_images(config, img_size)
    net = build_model(config, images)
    return Parts(images, Classifier(net, images, img_size, precision, team.device))


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from.

    Attributes:
        speeds: of each rank, measured; empty for a plan made by hand.
        forecast, wire: None for a plan made by hand; no wire for that of a continued run.
        overlaps: the engine that it was made for does; see motley.engine.
        with_all: the forecast with all ranks, if the plan leaves some out.
        links: between the machines, those left out included; None where not measured.
    """

    plan: Plan
    speeds: tuple[Speed, ...] = ()
    forecast: Forecast | None = None
    wire: Wire | None = None
    overlaps: bool = True
    with_all: Forecast | None = None
    links: Links | None = None


def plan_batch(
    world: World,
    run: Run | None,
    team: Team,
    parts: Parts | None,
    config: Config,
    overlaps: bool = True,
) -> tuple[Team, Planned]:
    """Who does how much of every global batch. Every launched rank calls it.

    Args:
        overlaps: the engine does; see motley.engine.
        run: may be a continued one; None if nothing is to be trained.
        parts: None on a rank that is left out.

    Returns:
        Those who train, all or without hosts that make a step longer; and their plan.
    """
    if config.shares is not None:
        shares = parse_shares(config.shares, team.size)
        sizes = parse_micro_batches(config.micro_batch, config.batch_size, shares)
        return team, Planned(make_plan(config.batch_size, shares, sizes), overlaps=overlaps)
    if run is not None and (before := _plan_before(world, run, team, config, overlaps)) is not None:
        return before
    make_plan(config.batch_size, (1.0,) * team.size, (1,) * team.size)  # refuses too small a batch
    model = parts.model if parts else None
    measured = measure_team(world, team, model, config)
    if config.micro_batch is not None:
        most = parse_micro_batches(config.micro_batch, config.batch_size, (1.0,) * team.size)
        pairs = zip(measured.speeds, most, strict=True)
        measured = replace(measured, speeds=tuple(speed.at_most(size) for speed, size in pairs))
    all_ranks, with_all = team, None
    own = None if team.rank is None else measured.speeds[team.rank]
    if config.hosts == "auto":
        team, measured, with_all = _leave_out(world, run, team, model, config, measured, overlaps)
        model = model if team.rank is not None else None
    measured = refine(world, team, model, config.batch_size, measured)
    if config.micro_batch is None and own is not None:
        remember(all_ranks, config, own if team.rank is None else measured.speeds[team.rank])
    return team, replace(balance(config.batch_size, measured, overlaps), with_all=with_all)


def _leave_out(
    world: World,
    run: Run | None,
    team: Team,
    model: Classifier | None,
    config: Config,
    measured: Measured,
    overlaps: bool,
) -> tuple[Team, Measured, Forecast | None]:
    """Who trains if a step is to be short, what was measured of them, and, if some are left
    out, the forecast with all."""
    machines = [world.machines[member.rank] for member in team.members]
    # Who trains first reads and writes checkpoints, and is where MASTER_ADDR is.
    free = (run is None or run.is_shared()) and not world.has_fixed_master()
    choice = choose_machines(
        config.batch_size, machines, measured.speeds, _through(measured.wire, overlaps),
        measured.links, None if free else world.machines[0],
    )  # fmt: skip
    if len(choice.ranks) == team.size:
        return team, measured, None
    stay = [team.members[rank] for rank in choice.ranks]
    hosts = ", ".join(dict.fromkeys(member.host for member in stay))
    slower = (
        f"with all a step would take {choice.whole.step_s:.3g} s, with {hosts} alone "
        f"{choice.chosen.step_s:.3g} s"
    )

    def reason(rank: int) -> str:
        link = measured.links.remark(machines[rank]) if measured.links else ""
        why = "the share would be less than a sample" if rank in choice.idle else slower
        return f"{link}{': ' if link else ''}{why}; --hosts all keeps all"

    reasons = {member.rank: reason(rank) for rank, member in enumerate(team.members)}
    team = narrow_team(world, team, {member.rank for member in stay}, reasons)
    speeds = tuple(measured.speeds[rank] for rank in choice.ranks)
    wire = wire_of(world, team, model)
    return team, Measured(speeds, wire, measured.links), choice.whole


def balance(global_batch: int, measured: Measured, overlaps: bool) -> Planned:
    """Shares by measured speed, and what to expect of them.

    Args:
        overlaps: the engine does; see motley.engine.
    """
    speeds, wire = measured.speeds, _through(measured.wire, overlaps)
    counts = split(global_batch, speeds)
    predicted = forecast(counts, speeds, wire)
    sizes = [speed.micro_batch for speed in speeds]
    plan = make_plan(global_batch, counts, sizes, predicted.buckets)
    return Planned(plan, speeds, predicted, wire, overlaps, links=measured.links)


def _through(wire: Wire, overlaps: bool) -> Wire:
    """As an engine can use it."""
    return replace(wire, overlaps=wire.overlaps and overlaps)


def _plan_before(
    world: World, run: Run, team: Team, config: Config, overlaps: bool
) -> tuple[Team, Planned] | None:
    """The plan that the run which is continued began with, if the same ranks go on through an
    engine alike: so, to the bit, do they, unless that run had to change it."""
    content = world.from_first(run.read_continued)
    same = ("batch_size", "micro_batch", "shares", "hosts")
    old: dict[str, Any] = content.get("config", {})
    ranks: list[dict[str, Any]] = content.get("ranks", [])
    left_out: list[dict[str, Any]] = content.get("left_out", [])
    kept = {rank["rank"] for rank in ranks}
    members = narrowed(team.members, kept)
    started = kept | {rank["rank"] for rank in left_out} == set(range(world.size))
    if not ranks or not started or ranks != [asdict(member) for member in members]:
        return None
    if any(old.get(key) != getattr(config, key) for key in same):
        return None
    plan = content["plan"]
    if plan.get("overlaps") != overlaps:  # or of a version that measured less
        return None
    speeds = [Speed.from_json(each) for each in plan["speeds"]]
    known = plan["forecast"] and Forecast.from_json(plan["forecast"])
    if len(members) < team.size:
        reasons = {entry["rank"]: entry["reason"] for entry in left_out}
        team = narrow_team(world, team, kept, reasons)
    made = make_plan(plan["global_batch"], plan["shares"], plan["max_micro_batch"], plan["buckets"])
    return team, Planned(made, tuple(speeds), known, overlaps=overlaps)
