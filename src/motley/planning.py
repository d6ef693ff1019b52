"""Makes the plan: from ``--shares``, from the run that is continued, or from measured speeds."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from motley.balance import Speed, split
from motley.data import load_images
from motley.forecast import Forecast, Wire, forecast
from motley.launch import World
from motley.model import Classifier, build_model, image_size, set_matmul_precision
from motley.options import Config
from motley.plan import Plan, make_plan, parse_micro_batches, parse_shares
from motley.runs import Run
from motley.sampler import Loader
from motley.speeds import Measured, measure_team, refine, remember
from motley.team import Team


@dataclass(frozen=True)
class Parts:
    """What a rank that trains has before there is a plan."""

    loader: Loader
    model: Classifier


def open_parts(team: Team, config: Config) -> Parts:
    """Open the data and build the model."""
    assert team.rank is not None
    img_size, precision = image_size(config), team.precisions[team.rank]
    set_matmul_precision(precision)
    images = load_images(config, img_size)
    loader = Loader(images, config, img_size, team.rank, team.device)
    net = build_model(config, images)
    return Parts(loader, Classifier(net, images, img_size, precision, team.device))


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from.

    Attributes:
        speeds: of each rank, measured; empty for a plan made by hand.
        forecast, wire: None for a plan made by hand; no wire for that of a continued run.
        overlaps: the engine that it was made for does; see motley.engine.
    """

    plan: Plan
    speeds: tuple[Speed, ...] = ()
    forecast: Forecast | None = None
    wire: Wire | None = None
    overlaps: bool = True


def plan_batch(
    world: World,
    run: Run | None,
    team: Team,
    parts: Parts | None,
    config: Config,
    overlaps: bool = True,
) -> Planned:
    """Who does how much of every global batch. Every launched rank calls it.

    Args:
        overlaps: the engine does; see motley.engine.
        run: may be a continued one; None if nothing is to be trained.
        parts: None on a rank that is left out.
    """
    if config.shares is not None:
        shares = parse_shares(config.shares, team.size)
        sizes = parse_micro_batches(config.micro_batch, config.batch_size, shares)
        return Planned(make_plan(config.batch_size, shares, sizes), overlaps=overlaps)
    if run is not None and (before := _plan_before(world, run, team, config, overlaps)) is not None:
        return before
    make_plan(config.batch_size, (1.0,) * team.size, (1,) * team.size)  # refuses too small a batch
    model = parts.model if parts else None
    measured = measure_team(world, team, model, config)
    if config.micro_batch is not None:
        most = parse_micro_batches(config.micro_batch, config.batch_size, (1.0,) * team.size)
        pairs = zip(measured.speeds, most, strict=True)
        measured = dataclasses.replace(
            measured, speeds=tuple(speed.at_most(size) for speed, size in pairs)
        )
    measured = refine(world, team, model, config.batch_size, measured)
    if config.micro_batch is None:
        remember(team, config, measured)
    return balance(config.batch_size, measured, overlaps)


def balance(global_batch: int, measured: Measured, overlaps: bool) -> Planned:
    """Shares by measured speed, and what to expect of them.

    Args:
        overlaps: the engine does; see motley.engine.
    """
    speeds, wire = measured.speeds, measured.wire
    wire = dataclasses.replace(wire, overlaps=wire.overlaps and overlaps)
    counts = split(global_batch, speeds)
    predicted = forecast(counts, speeds, wire)
    sizes = [speed.micro_batch for speed in speeds]
    plan = make_plan(global_batch, counts, sizes, predicted.buckets)
    return Planned(plan, speeds, predicted, wire, overlaps)


def _plan_before(
    world: World, run: Run, team: Team, config: Config, overlaps: bool
) -> Planned | None:
    """The plan that the run which is continued began with, if the same ranks go on through an
    engine alike: so, to the bit, do they, unless that run had to change it."""
    content = world.from_first(run.read_continued)
    same = ("batch_size", "micro_batch", "shares")
    old: dict[str, Any] = content.get("config", {})
    members = [dataclasses.asdict(member) for member in team.members]
    if content.get("ranks") != members or any(old.get(k) != getattr(config, k) for k in same):
        return None
    plan = content["plan"]
    if plan.get("overlaps") != overlaps:  # or of a version that measured less
        return None
    speeds = [Speed.from_json(each) for each in plan["speeds"]]
    known = plan["forecast"] and Forecast.from_json(plan["forecast"])
    return Planned(
        make_plan(
            plan["global_batch"], plan["shares"], plan["max_micro_batch"], plan["buckets"]
        ),
        tuple(speeds), known, overlaps=overlaps,
    )  # fmt: skip
