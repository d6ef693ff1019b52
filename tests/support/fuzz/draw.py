"""Makes cases up, and makes them smaller."""

import random
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import accumulate
from typing import Any

from fuzz.cases import AFTER, BAD_IMAGES, Case, Fault, Recipe, Segment
from fuzz.model import BY_BATCH, CHANGED_IN_FORWARD, PARTS

MOST_STEPS = 14
WHOLE = ("ddp", "zero0")  # engines in which each rank holds, and could repair, everything


@cache
def optimizers() -> tuple[str, ...]:
    """timm's names."""
    from timm.optim import list_optimizers

    return tuple(sorted(list_optimizers()))


def draw(dice: random.Random, most_ranks: int = 6) -> Case:
    """A case.

    Args:
        most_ranks: in a job; where there are GPUs, as many as these.
    """
    exact = dice.random() < 0.75
    recipe = _recipe(dice, exact)
    if exact and dice.random() < 0.7:
        recipe = _with_parts(dice, recipe)
    steps = sum(map(len, recipe.sizes()))
    first = _segment(dice, recipe, exact, most_ranks)
    segments = [first]
    for _ in range(dice.choice((0, 0, 1, 1, 1, 2))):
        alike = dice.random() < 0.4 or (not exact and dice.random() < 0.7)
        other = first if alike else _segment(dice, recipe, exact, most_ranks)
        segments.append(replace(other, changed={}, brief=dice.random() < 0.5))
        if dice.random() < 0.3 and not alike:
            segments[-1] = replace(segments[-1], changed=_changed(dice, recipe))
    changed: dict[str, Any] = {}
    at = 0
    for number, segment in enumerate(segments):
        changed = {**changed, **segment.changed}  # a user goes on with what was changed
        last = number == len(segments) - 1
        stop = None if last else dice.randint(min(at + 1, steps), steps)
        faults, after = (), ()
        if dice.random() < 0.45:
            faults = _faults(dice, replace(recipe, **changed), segment, at, stop or steps, last)
        if not last and dice.random() < 0.25:
            after = (dice.choice(AFTER),)
        at = stop or at
        segments[number] = replace(segment, stop=stop, changed=changed, faults=faults, after=after)
    return Case(recipe, tuple(segments))


def _recipe(dice: random.Random, exact: bool) -> Recipe:
    size = dice.choice((1, 2, 3, 5, 6, 7, 8, 8, 11, 12, 13, 16, 24, 60))
    epochs = dice.randint(1, 3)
    most = max(3, min(40, size * (MOST_STEPS // epochs)))
    samples = dice.randint(3, most)
    ramp: tuple[int, ...] = ()
    if size > 2 and dice.random() < 0.2:
        by = dice.choice([each for each in range(1, size) if size % each == 0])
        ramp = (size - by * dice.randint(1, size // by - 1), by, dice.randint(1, samples * epochs))
    opt = "adamw" if dice.random() < 0.55 else dice.choice(optimizers())
    recipe = Recipe(
        opt=opt, batch_size=size, ramp=ramp, samples=samples, epochs=epochs,
        ramp_lr=dice.choice(("none", "linear", "sqrt")) if ramp else "none",
        lr=dice.choice((1e-3, 3e-4)), clip_grad=dice.choice((None, None, 1.0, 0.1)),
        weight_decay=dice.choice((0.0, 0.05)), smoothing=dice.choice((0.0, 0.1)),
        warmup_epochs=dice.choice((0.0, 0.5, 1.0, 5.0)), min_lr=dice.choice((0.0, 1e-5)),
        drop=0.0 if exact else dice.choice((0.0, 0.1)),
        drop_path=0.0 if exact else dice.choice((0.0, 0.0, 0.1)),
        save_every=dice.choice((None, None, 1, 2, 3)), eval_images=dice.choice((1, 7, 20)),
        seed=dice.randint(0, 3),
        bad_images=tuple(dice.sample(BAD_IMAGES, dice.randint(1, 2)))
        if samples > 6 and dice.random() < 0.12 else (),
        sides=(dice.randint(8, 30), dice.randint(8, 30)) if dice.random() < 0.15 else (),
    )  # fmt: skip
    recipe = replace(
        recipe, eval_every=dice.choice((None, None, None, 1, 2, 3)),
        keep_best=dice.choice((None, None, "loss")),
        lr_cycle_limit=dice.choice((1, 1, 1, 2, 3)),
        warmup_steps=dice.choice((None, None, None, 0, 2)),
        warmup_lr=dice.choice((None, None, None, 1e-4)),
        lr_noise=dice.choice((None, None, None, (0.0,), (0.3, 0.7))),
        weight_decay_end=0.3 if recipe.weight_decay and dice.random() < 0.2 else None,
        balanced_sampling=not recipe.of_folder and dice.random() < 0.15,
    )  # fmt: skip
    if exact and not recipe.of_folder and dice.random() < 0.2:
        recipe = replace(recipe, class_weights="1,2,0.5,3,0.1,1,4,1,0.7,2")
    if dice.random() < 0.15:
        recipe = replace(
            recipe, aug_splits=dice.choice((2, 3)), aa=dice.choice(("augmix-m5-w2-d1", "rand-m9")),
            jsd_loss=recipe.class_weights is None and dice.random() < 0.6,
        )  # fmt: skip
    recipe = replace(
        recipe, test_crops=dice.choice((1, 1, 1, 5)), metrics=dice.choice((None, None, "f1_macro"))
    )
    if recipe.clip_grad and dice.random() < 0.3:
        mode = "value" if dice.random() < 0.7 else "agc"
        recipe = replace(recipe, clip_mode=mode, clip_grad=0.01)
    many = sum(map(len, recipe.sizes())) > 2 * MOST_STEPS
    return replace(recipe, ramp=(), ramp_lr="none") if many else recipe


def _with_parts(dice: random.Random, recipe: Recipe) -> Recipe:
    """Return a recipe whose model has other parts than a plain one, or is averaged."""
    usual = sorted(set(PARTS) - CHANGED_IN_FORWARD)
    parts = tuple(dice.sample(usual, dice.choice((1, 1, 1, 2))))
    if dice.random() < 0.1:  # nearly all of these are refused
        parts = (dice.choice(sorted(CHANGED_IN_FORWARD)),)
    recipe = replace(
        recipe, parts=parts, model_ema_decay=dice.choice((None, 0.5, 0.9)), smoothing=0.0,
        # Optimizers differ in the first step of a parameter that has had no gradient before.
        opt="adamw" if "experts" in parts else recipe.opt,
    )  # fmt: skip
    if BY_BATCH.isdisjoint(parts):
        return recipe
    group = dice.choice((3, 4, 6))
    most = max(1, 24 // group)
    size = group * dice.randint(1, most)
    samples = max(recipe.samples, size) if dice.random() < 0.7 else recipe.samples
    return replace(
        recipe, bn_group=group, batch_size=size, samples=min(samples, 60), ramp=(), ramp_lr="none"
    )


def _segment(dice: random.Random, recipe: Recipe, exact: bool, most: int) -> Segment:
    engine = dice.choice(("ddp", "ddp", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"))
    ranks = min(most, dice.choice((1, 2, 2, 2, 3, 3, 3, 4, 5, 6)))
    groups = recipe.batch_size // recipe.bn_group
    if ranks > groups and dice.random() < 0.9:
        ranks = groups
    kind = dice.randrange(4)
    shares = [dice.randint(1, 5) for _ in range(ranks)]
    if kind == 0:
        shares = [1] * ranks
    elif kind == 1 and ranks > 1:
        shares[dice.randrange(ranks)] = 0
    elif kind == 2:
        shares[dice.randrange(ranks)] = 50
    if dice.random() < 0.06:
        shares = []  # measured; takes a second or two
    micro = dice.choice((None, None, (dice.randint(1, 9),),
                         tuple(dice.randint(1, 9) for _ in range(ranks))))  # fmt: skip
    precision: tuple[str, ...] = ("fp32",)
    wire, scale = dice.choice(("auto", "exact")), dice.choice(("auto", "auto", "2^8", "dynamic"))
    if not exact:
        mixed = tuple(dice.choice(("fp32", "bf16", "fp16")) for _ in range(ranks))
        precision = dice.choice((("fp32",), ("bf16",), ("fp16",), mixed))
        wires = ["auto", "bf16", "fp16"]
        if engine == "ddp":
            wires += ["powersgd:1", "powersgd:2", "powersgd:2", "local:2", "local:3"]
        wire = dice.choice(wires)
    elif engine == "ddp" and dice.random() < 0.1:
        wire = dice.choice(("local:1", "powersgd:64"))
    elif engine == "ddp" and ranks > 2 and dice.random() < 0.1:
        wire = f"exact/leaf{dice.randrange(ranks)}"
    return Segment(
        engine, ranks, tuple(shares), micro, precision, wire, scale,
        recompute=dice.choice((None, None, None, "blocks", "mlp")),
    )  # fmt: skip


def _changed(dice: random.Random, recipe: Recipe) -> dict[str, Any]:
    others = {
        "batch_size": dice.choice((2, 3, 4, 6, 10)), "lr": 5e-4, "epochs": recipe.epochs + 1,
        "clip_grad": 0.5, "warmup_epochs": 0.25, "min_lr": 1e-6, "smoothing": 0.05,
        "weight_decay": 0.02,
    }  # fmt: skip
    if recipe.by_batch:
        del others["batch_size"]
    name = (
        "batch_size"
        if "batch_size" in others and dice.random() < 0.4
        else dice.choice(tuple(others))
    )
    if getattr(recipe, name) == others[name]:
        return {}
    return {name: others[name], **({"ramp": ()} if name == "batch_size" and recipe.ramp else {})}


def _faults(
    dice: random.Random, recipe: Recipe, segment: Segment, at: int, stop: int, last: bool
) -> tuple[Fault, ...]:
    step = dice.randint(at, max(at, stop - 1))
    shares = segment.shares or (1,) * segment.ranks
    busy = max(range(segment.ranks), key=lambda rank: shares[rank])
    inexact = segment.wire.startswith(("local", "powersgd"))
    kinds = ["stranger"] if recipe.by_batch else ["stranger", "oom"]
    if not last:
        kinds += ["kill", "kill", "kill"]
    if segment.loss_scale != "auto" and not inexact:
        kinds += ["overflow"]
    if segment.ranks > 1 and not inexact:
        if not recipe.by_batch:
            kinds += ["replan"]
        if segment.engine in WHOLE:
            kinds += ["flip"]
    kind = dice.choice(kinds)
    if kind == "kill":
        return (Fault(kind, step, dice.choice((-1, -1, 0)), dice.randrange(24)),)
    if kind == "replan":
        counts = [1] * segment.ranks
        for _ in range(recipe.batch_size - segment.ranks):
            counts[dice.randrange(segment.ranks)] += 1
        if sum(counts) != recipe.batch_size:
            return ()
        return (Fault(kind, step, -1, 0, tuple(counts)),)
    if kind == "flip":
        # Found at the next checkpoint; one that follows at once leaves the losses as they are.
        ends = list(accumulate(map(len, recipe.sizes())))
        if every := recipe.save_every:
            ends = [(step // every + 1) * every]
        step = next(end for end in [*ends, step + 1] if end > step) - 1
        return (Fault(kind, step, dice.randrange(segment.ranks), dice.randrange(2)),)
    if kind == "stranger":
        return (Fault(kind, step, 0, dice.randrange(5)),)
    return (Fault(kind, step, busy, dice.randrange(2)),)


# -- making smaller


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest things first."""
    for number in range(len(case.segments)):
        if len(case.segments) > 1:
            yield replace(case, segments=_without(case.segments, number))
    for number, segment in enumerate(case.segments):
        for simpler in _simpler(segment):
            segments = (*case.segments[:number], simpler, *case.segments[number + 1 :])
            yield replace(case, segments=segments)
    usual = Recipe()
    for entry in fields(Recipe):
        if getattr(case.recipe, entry.name) != getattr(usual, entry.name):
            simple = {entry.name: getattr(usual, entry.name)}
            yield replace(case, recipe=replace(case.recipe, **simple))
    if case.recipe.epochs > 1:
        yield replace(case, recipe=replace(case.recipe, epochs=1))
    for part in case.recipe.parts if len(case.recipe.parts) > 1 else ():
        yield replace(case, recipe=replace(case.recipe, parts=(part,)))


def _without(items: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    kept = (*items[:number], *items[number + 1 :])
    return (*kept[:-1], replace(kept[-1], stop=None)) if number == len(items) - 1 else kept


def _simpler(segment: Segment) -> Iterator[Segment]:
    if segment.faults:
        yield replace(segment, faults=())
    if segment.after:
        yield replace(segment, after=())
    for name in segment.changed:
        rest = {key: value for key, value in segment.changed.items() if key != name}
        yield replace(segment, changed=rest)
    least = 1 + max((fault.rank for fault in segment.faults), default=0)
    for ranks in (1, 2, 3):
        if least <= ranks < segment.ranks and not any(f.counts for f in segment.faults):
            yield replace(
                segment, ranks=ranks, shares=(1,) * ranks, micro=None,
                precision=segment.precision[:1], wire=segment.wire.split("/")[0],
            )  # fmt: skip
    usual = Segment()
    for name in ("engine", "micro", "precision", "wire", "loss_scale", "recompute", "brief"):
        if getattr(segment, name) != getattr(usual, name):
            yield replace(segment, **{name: getattr(usual, name)})
    if segment.shares != (1,) * segment.ranks:
        yield replace(segment, shares=(1,) * segment.ranks)
