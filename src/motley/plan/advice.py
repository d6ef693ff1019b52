"""What a user may ask for that would be faster than what was planned, in words. Pure."""

from collections.abc import Mapping, Sequence

from motley.plan.engine_traits import EngineTraits
from motley.plan.forecast import Choice, Forecast, arrange, choose_machines, rates_of
from motley.plan.links import Links
from motley.plan.speed_table import SpeedTable
from motley.plan.wire import AllReduceCost, WireMode

_WORTH_A_WORD = 0.1  # of a step, that what a user did not ask for would save
_BEATS = 1.1  # times the best machine alone: what a lab should at least be
_DOUBLINGS = 6  # of the batch, at most
_WAITS = 0.1  # of a rank's time, for its samples: worth a word
_FASTEST = 6  # machines, one of which is the best alone


def better_modes(
    options: Mapping[WireMode, Choice], mode: WireMode, names: Sequence[str]
) -> tuple[str, ...]:
    """What a user may ask for that would be faster than ``mode``: the fastest that only rounds,
    and the fastest of all, a sentence each.

    Args:
        options: who would train in each mode. names: of the ranks' hosts.
    """
    sentences = []
    best = options[mode].chosen.step_s
    for inexact in (False, True):
        found = [m for m in options if m != mode and m.is_inexact == inexact]
        other = min(found, key=lambda m: options[m].chosen.step_s, default=mode)
        choice = options[other]
        if choice.chosen.step_s > (1 - _WORTH_A_WORD) * best:
            continue
        hosts = ", ".join(dict.fromkeys(names[rank] for rank in choice.ranks))
        who = f" with {hosts} alone" if len(choice.ranks) < len(names) else " with all hosts"
        sentences.append(
            f"with --wire {other} a step should take {choice.chosen.step_s:.3g} s{who}, "
            f"{best / choice.chosen.step_s:.2f} times as fast; {other.price}"
        )
        best = choice.chosen.step_s
    return tuple(sentences)


def better_engine(
    traits: EngineTraits, predicted: Forecast, engines: Mapping[str, Forecast]
) -> tuple[str, ...]:
    """An engine that sends otherwise and would be faster, a sentence.

    Args:
        engines: forecasts, by what a user writes to have them.
    """
    best = min(engines, key=lambda name: engines[name].step_s, default=None)
    if best is None or engines[best].step_s > (1 - _WORTH_A_WORD) * predicted.step_s:
        return ()
    step_s = engines[best].step_s
    return (
        f"{traits.words}: {predicted.exposed_s:.3g} s of a step that nothing hides; with {best} "
        f"a step should take {step_s:.3g} s, {predicted.step_s / step_s:.2f} times as fast",
    )


def larger_batch(
    global_batch: int,
    names: Sequence[str],
    machines: Sequence[int],
    speeds: Sequence[SpeedTable],
    wire: AllReduceCost,
    links: Links | None = None,
) -> tuple[str, ...]:
    """That the batch is too small for these machines to beat the best of them, and which is not;
    nothing where it is not so, or where none would do.

    Args:
        names, machines: of the ranks.
        wire: of what the plan would send.
    """

    rates = rates_of(machines, speeds)
    fastest = sorted(rates, key=lambda machine: -rates[machine])[:_FASTEST]
    ranks_of = [[r for r, m in enumerate(machines) if m == machine] for machine in fastest]

    def gain(samples: int) -> tuple[float, int]:
        """Times as fast as the best machine alone, and a rank of that one."""
        alone = {}
        for ranks in ranks_of:
            few, less = [speeds[rank] for rank in ranks], wire.among(machines, ranks, links)
            alone[ranks[0]] = arrange(samples, few, less)[2].step_s
        best = min(alone, key=lambda rank: alone[rank])
        together = choose_machines(samples, machines, speeds, wire, links).chosen
        return alone[best] / together.step_s, best

    times, best = gain(global_batch)
    if len(rates) < 2 or times >= _BEATS:
        return ()
    for power in range(1, _DOUBLINGS + 1):
        samples = global_batch * 2**power
        larger, _ = gain(samples)
        if larger >= _BEATS:
            return (
                f"these hosts together are {max(1.0, times):.2f} times as fast as {names[best]} "
                f"alone: a step is too short for what they have to tell each other; with "
                f"--batch-size {samples} they should be {larger:.2f} times as fast",
            )
    return ()


def bound_by_input(
    names: Sequence[str], speeds: Sequence[SpeedTable], counts: Sequence[int]
) -> tuple[str, ...]:
    """The hosts whose ranks wait for their samples, and what helps; a sentence each.

    Args:
        names: of the ranks' hosts. counts: samples of each in a step.
    """
    sentences = {}
    for name, speed, n in zip(names, speeds, counts, strict=True):
        if not n or speed.waits_s(n) < _WAITS * speed.seconds_of(n):
            continue
        readers = speed.readers or 0
        who = f"{readers} loader processes" if readers > 1 else "one process"
        more = f", or --workers {readers + 1} if it has cores to spare" if not readers else ""
        sentences[name] = (
            f"{name} waits for its samples: {who} a rank can read {1 / speed.input_s:,.0f} a "
            f"second, and a rank could compute {n / speed.computing().seconds_of(n):,.0f}; what "
            f"helps is --dataset packed (see setup/stage_cn.sh -h){more}"
        )
    return tuple(sentences.values())
