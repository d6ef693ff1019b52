"""Advice to the user: options that would make a run faster. All functions are pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from motley.plan.forecast import (
    Choice,
    Forecast,
    choose_machines,
    compute_rates,
    split_and_forecast,
)
from motley.plan.speeds import Links, SpeedTable
from motley.plan.wire import AllReduceCost, EngineTraits, WireMode
from motley.text import format_rate, typed_command

_WORTH_A_WORD = 0.1  # fraction of a step that an unrequested option must save
_BEATS = 1.1  # speed relative to the best host alone that all hosts together should reach
_DOUBLINGS = 6  # most doublings of the batch that are tried
_WAITS = 0.1  # fraction of a rank's time waiting for samples that is reported
_FASTEST = 6  # fastest hosts, among which the best one alone is searched


@dataclass(frozen=True)
class Advice:
    """A piece of advice: an option that the user may choose, or a fact about the plan.

    Attributes:
        text: the advice as a sentence.
        option: words to add to the command line; empty if the advice is a fact and not an option.
        times: expected samples per second with the option, divided by the expected samples per
            second of the plan. None: unknown.
        price: known disadvantage of the option, in words; empty without one.
    """

    text: str
    option: str = ""
    times: float | None = None
    price: str = ""

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> dict[str, Any]:
        """Return the advice for run.json; :meth:`from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Advice":
        """Read the result of :meth:`as_json`."""
        return cls(**{each.name: content[each.name] for each in fields(cls)})


def better_modes(
    options: Mapping[WireMode, Choice], mode: WireMode, names: Sequence[str]
) -> tuple[Advice, ...]:
    """Return advice on wire modes that would be faster than ``mode``.

    A wire mode is the form in which gradients travel between ranks. The advice names the fastest
    mode that only rounds the gradient. If the fastest inexact mode is faster still, the advice
    names this mode too.

    Args:
        options: for each measured mode, the ranks that would train and their forecast.
        mode: the planned wire mode.
        names: host of each rank.
    """
    found_better = []
    best = planned_s = options[mode].chosen.step_s
    for inexact in (False, True):
        result = [m for m in options if m != mode and m.is_inexact == inexact]
        other = min(result, key=lambda m: options[m].chosen.step_s, default=mode)
        choice = options[other]
        if choice.chosen.step_s > (1 - _WORTH_A_WORD) * best:
            continue
        hosts = ", ".join(dict.fromkeys(names[rank] for rank in choice.ranks))
        who = f" with {hosts} alone" if len(choice.ranks) < len(names) else " with all hosts"
        text = (
            f"with --wire {other} a step should take {choice.chosen.step_s:.3g} s{who}, "
            f"{best / choice.chosen.step_s:.2f} times as fast; {other.price}"
        )
        best = choice.chosen.step_s
        found_better.append(Advice(text, f"--wire {other}", planned_s / best, other.price))
    return tuple(found_better)


def fewer_hosts(
    choice: Choice,
    planned_s: float,
    names: Sequence[str],
    machines: Sequence[int],
    links: Links | None,
) -> tuple[Advice, ...]:
    """Advise the user to leave out hosts if a step would be shorter without them.

    Args:
        choice: the ranks that would train if all hosts were optional.
        planned_s: seconds of a step with all requested hosts.
        names: host of each rank.
        machines: number of each rank's host.
        links: measured links between the hosts; None: not measured.
    """
    times = planned_s / choice.chosen.step_s
    out = [rank for rank in range(len(names)) if rank not in choice.ranks]
    if not out or times < 1 / (1 - _WORTH_A_WORD):
        return ()
    stay, away = (
        list(dict.fromkeys(names[rank] for rank in ranks)) for ranks in (choice.ranks, out)
    )
    remarks = dict.fromkeys(links.remark(machines[rank]) for rank in out) if links else {}
    why = "".join(f"; {remark}" for remark in remarks if remark)
    text = (
        f"without {', '.join(away)} a step should take {choice.chosen.step_s:.3g} s, "
        f"{times:.2f} times as fast; --hosts auto leaves out hosts that slow the others{why}"
    )
    return (Advice(text, f"--hosts {','.join(stay)}", times),)


def better_engine(
    traits: EngineTraits, predicted: Forecast, engines: Mapping[str, Forecast]
) -> tuple[Advice, ...]:
    """Advise another engine if its communication takes less time.

    Args:
        traits: traits of the engine in use.
        predicted: forecast for the engine in use.
        engines: forecasts for other engines, by the option that selects the engine.
    """
    best = min(engines, key=lambda name: engines[name].step_s, default=None)
    if best is None or engines[best].step_s > (1 - _WORTH_A_WORD) * predicted.step_s:
        return ()
    step_s = engines[best].step_s
    times = predicted.step_s / step_s
    text = (
        f"{traits.words}, which takes {predicted.exposed_s:.3g} s of each step that no compute "
        f"hides; with {best} a step should take {step_s:.3g} s, {times:.2f} times as fast"
    )
    return (Advice(text, best, times),)


def larger_batch(
    global_batch: int,
    names: Sequence[str],
    machines: Sequence[int],
    speeds: Sequence[SpeedTable],
    wire: AllReduceCost,
    links: Links | None = None,
) -> tuple[Advice, ...]:
    """Advise a larger batch if all hosts together are hardly faster than the fastest host alone.

    The advice is empty if the batch is large enough, or if no larger batch would help.

    Args:
        global_batch: samples in a step.
        names: host of each rank.
        machines: number of each rank's host.
        speeds: measured speed of each rank.
        wire: cost of an all-reduce in the planned mode.
        links: measured links between the hosts; None: not measured.
    """
    rates = compute_rates(machines, speeds)
    fastest = sorted(rates, key=lambda machine: -rates[machine])[:_FASTEST]
    ranks_of = [[r for r, m in enumerate(machines) if m == machine] for machine in fastest]

    def gain(samples: int) -> tuple[float, int, float]:
        """Return three values for a batch of ``samples`` samples.

        The values are the speed of all hosts relative to the fastest host alone, a rank of that
        host, and the samples per second of all hosts.
        """
        alone = {}
        for ranks in ranks_of:
            few, less = [speeds[rank] for rank in ranks], wire.among(machines, ranks, links)
            alone[ranks[0]] = split_and_forecast(samples, few, less)[2].step_s
        best = min(alone, key=lambda rank: alone[rank])
        together = choose_machines(samples, machines, speeds, wire, links).chosen
        return alone[best] / together.step_s, best, together.samples_per_s

    times, best, planned = gain(global_batch)
    if len(rates) < 2 or times >= _BEATS:
        return ()
    for power in range(1, _DOUBLINGS + 1):
        samples = global_batch * 2**power
        larger, _, rate = gain(samples)
        if larger >= _BEATS:
            text = (
                f"these hosts together are only {max(1.0, times):.2f} times as fast as "
                f"{names[best]} alone, because exchanging gradients takes too large a part of "
                f"such a short step; with --batch-size {samples} they should be {larger:.2f} "
                "times as fast"
            )
            price = "a larger batch changes the training, so adjust --lr"
            return (Advice(text, f"--batch-size {samples}", rate / planned, price),)
    return ()


def bound_by_input(
    names: Sequence[str], speeds: Sequence[SpeedTable], counts: Sequence[int], packs: bool
) -> tuple[Advice, ...]:
    """Advise a remedy for each host whose ranks wait for the data loader.

    Args:
        names: host of each rank.
        speeds: speed of each rank.
        counts: samples of each rank in a step.
        packs: True if the samples are image files. ``--dataset packed`` would read them faster.
    """
    packed = typed_command("--dataset packed reads images faster (see setup/stage_cn.sh -h)")
    result = {}
    for name, speed, n in zip(names, speeds, counts, strict=True):
        if not n or speed.waits_s(n) < _WAITS * speed.compute_seconds(n):
            continue
        readers = speed.readers or 0
        who = f"{readers} loader process{'es' * (readers > 1)}" if readers else "each rank itself"
        reads = format_rate(1 / speed.input_s)
        computes = format_rate(n / speed.computing().compute_seconds(n))
        if speed.reads_ahead:
            how = f"{who} can read {reads} samples/s, and the rank could compute {computes}"
        else:
            how = (
                f"{who} reads {reads} samples/s and does not read while the rank computes "
                f"({computes} samples/s), since "
            ) + ("they share its cores" if readers else "it has no loader process")
        fixes = [packed] * packs
        if not readers:
            fixes.append("--workers 1 reads during the compute, if a core is idle")
        text = f"input limits {name}: {how}" + "".join(f"; {fix}" for fix in fixes)
        result[name] = Advice(
            text, "--dataset packed" if packs else "" if readers else "--workers 1"
        )
    return tuple(result.values())
