"""The verdict on a run: its rate relative to an ideal run, causes of lost time, faster options.

In an ideal run no rank waits and no data is sent.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from motley.live.follow import slow_link
from motley.live.snapshot import fraction_of_limit
from motley.live.track import PARTS
from motley.plan.advice import Advice
from motley.plan.speeds import SpeedTable
from motley.records.costs import Array, Training, column, joules, leak, mean, median
from motley.records.json_files import JsonDict, finite
from motley.records.run_folder import RunFolder

_WORTH = 0.02  # fraction of a step, below which a part is noise
_OFF = 0.1  # deviation from the forecast that is reported
_FIRST = 2  # first steps, which are not typical, because kernels are built
_UNSURE = 1.5  # error factor of the plan from which its advice is called rough
_SLOWER = 1.15  # ratio to the measurement at the start that is reported
# Steps and seconds a step from which that ratio is no noise. Two ranks on two processors took 0.9
# to 1.7 times their measurement in steps of 30 to 70 ms, which is up to 11 ms. Loader processes and
# the system use the same processors.
_SLOWER_STEPS, _SLOWER_S, _SLOWER_GPU_S = 20, 0.02, 0.002
_JOULES_OF_KWH = 3.6e6
_FEW_KWH = 0.1
# World mean of 2023, grams of CO2 per kWh (Ember, Global Electricity Review 2024).
CO2_PER_KWH = 480.0
_PARTS = {
    "t_wait": "waiting for {who}", "t_comm": "the wire", "t_data": "input",
    "t_opt": "the optimizer", "t_host": "the host's Python",
}  # fmt: skip


@dataclass(frozen=True)
class Energy:
    """The energy of the GPUs that trained, from a run's first step to its last step.

    Attributes:
        joules_each: joules per image, or per other unit in which rates are counted.
        kwh: energy of all GPUs, in kWh.
        co2_kg: CO2 emission of this energy, in kg.
        co2_per_kwh: grams of CO2 per kWh, from which ``co2_kg`` is computed.
    """

    joules_each: float
    kwh: float
    co2_kg: float
    co2_per_kwh: float

    def sentence(self, unit: str) -> str:
        """Return a sentence for the user that states the energy."""
        kilo, times = ("k", 1) if self.kwh >= _FEW_KWH else ("", 1000)
        return (
            f"The GPUs took {times * self.kwh:.3g} {kilo}Wh, {self.joules_each:.3g} J per "
            f"{unit.removesuffix('s')}: {times * self.co2_kg:.3g} {kilo}g of CO2 at "
            f"{self.co2_per_kwh:g} g/kWh."
        )


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on one run. None and empty values are unknown.

    Attributes:
        fraction: rate of the run divided by the ideal rate, at which no rank waits and no data is
            sent.
        step_s: median seconds of a step.
        forecast_s: expected seconds of a step.
        lost: fraction of a step that each activity except computing takes, the largest first. Each
            fraction is the median over steps, averaged over ranks.
        link: sentence on the slowest link.
        slower: name of the rank whose compute time exceeds the measurement at the start by the
            largest factor; empty if the difference may be noise.
        slower_times: compute time of the rank ``slower``, divided by the time measured at the
            start.
        crowd: sentence that gives the reason, if it is known: the rank ``slower`` reads its
            samples too slowly, or its host has fewer processors than ranks.
        grows_mib: memory growth per step in MiB on the rank with the largest growth, if the memory
            grows until the end.
        energy: energy of the GPUs.
        advice: faster options, the fastest first, followed by advice without a known gain.
        unit: unit in which rates are counted, such as images.
    """

    fraction: float | None
    step_s: float | None
    forecast_s: float | None
    lost: dict[str, float]
    link: str
    slower: str
    slower_times: float | None
    crowd: str
    grows_mib: float | None
    energy: Energy | None
    advice: tuple[Advice, ...]
    unit: str

    def sentences(self) -> list[str]:
        """Return the sentences of the verdict, the most important sentence first."""
        sentences = [self._reached(), self._where_it_went(), self._who_is_slower()]
        sentences += [_sentence(each, self.unit, self._how_far_off()) for each in self.advice]
        if self.grows_mib:
            sentences.append(
                f"Memory grows by {self.grows_mib:.3g} MiB per step until the end of the run."
            )
        if self.energy:
            sentences.append(self.energy.sentence(self.unit))
        return [*filter(None, sentences)]

    def _reached(self) -> str:
        if self.step_s is None:
            return ""
        words = f"A step took {self.step_s:.3g} s"
        if self.forecast_s and abs(self.step_s / self.forecast_s - 1) > _OFF:
            words += f" ({self.forecast_s:.3g} expected)"
        if self.fraction is None:
            return f"{words}."
        if self.fraction > 1 + _OFF:
            return (
                f"{words}, which is {self.fraction:.2f} times the speed that was measured at the "
                "start. Other programs may have used the machines then."
            )
        return f"The run reached {self.fraction:.0%} of the limit, the sum of all devices. {words}."

    def _how_far_off(self) -> str:
        """Return a warning if the forecast was far off; else "". Advice relies on the forecast."""
        if not (self.step_s and self.forecast_s):
            return ""
        times = self.forecast_s / self.step_s
        times = max(times, 1 / times)
        return f" (rough: this plan erred by a factor of {times:.1f})" if times > _UNSURE else ""

    def _where_it_went(self) -> str:
        why = {_PARTS["t_comm"]: f" ({self.link})" if self.link else ""}
        parts = [
            f"{part:.0%} {name}{why.get(name, '')}"
            for name, part in self.lost.items() if part >= _WORTH
        ]  # fmt: skip
        return f"The rest of a step went to: {', '.join(parts)}." if parts else ""

    def _who_is_slower(self) -> str:
        if self.slower_times is None or self.slower_times < _SLOWER or not self.slower:
            return ""
        why = self.crowd or "another program uses the machine, or the machine has become slower"
        return (
            f"{self.slower} takes {self.slower_times:.2f} times as long as at the start for the "
            f"same samples: {why}."
        )

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as JSON, with None in place of NaN and infinities."""
        result: dict[str, Any] = finite(asdict(self))
        return result


def run_verdict(training: Training, co2_per_kwh: float | None = CO2_PER_KWH) -> RunVerdict:
    """Return the verdict on a run from its records.

    Only steps of the last launch count, because the plan belongs to that launch. If the launch has
    no steps, all steps count. The energy counts all launches.

    Args:
        training: records of the run.
        co2_per_kwh: grams of CO2 per kWh at the location of the hosts; None: no energy is computed.
    """
    energy = None if co2_per_kwh is None else _energy(training, co2_per_kwh)
    training = training.last_launch() or training
    steps = training.values("n_global") / training.values("samples_per_s")
    usual = _usual(training)
    step_s = _known(usual(steps))
    about, batch = training.run, usual(training.values("n_global"))
    rate = _known(batch / step_s) if step_s else None
    forecast = (about.get("plan") or {}).get("forecast") or {}
    seconds = forecast.get("step_s") if _is_full(training, forecast) else None
    lost = _lost(training)
    slower, times, crowd = _slower(training, forecast if seconds else {})
    on_wire = lost.get(_PARTS["t_comm"], 0.0) >= _WORTH
    return RunVerdict(
        fraction_of_limit(about, rate), step_s, seconds, lost,
        slow_link(about) if on_wire else "", slower, times, crowd, leak(training.steps),
        energy, _advice(about.get("advice") or ()), training.unit,
    )  # fmt: skip


def _energy(training: Training, co2_per_kwh: float) -> Energy | None:
    each = joules(RunFolder(training.path), training.steps)
    if each is None:
        return None
    samples = float(np.nansum(training.values("n_global")))
    counted = float(np.nansum(training.counted()))
    kwh = each * samples / _JOULES_OF_KWH
    return Energy(each * samples / counted, kwh, kwh * co2_per_kwh / 1000, co2_per_kwh)


def _is_full(training: Training, forecast: dict[str, Any]) -> bool:
    """Return True if the forecast was made for the batch size of the recorded steps."""
    return bool(median(training.values("n_global")) == forecast.get("global_batch"))


def _usual(training: Training) -> Callable[[Array], float]:
    """Return the function that averages the times of steps.

    The function is the median. With Local SGD the function is the mean, because only one step in
    many waits for communication.
    """
    wire = str((training.run.get("plan") or {}).get("wire", ""))
    return _mean_without_first if wire.startswith("local") else median


def _mean_without_first(values: Array) -> float:
    return mean(values[_FIRST:] if len(values) > 2 * _FIRST else values)


def _lost(training: Training) -> dict[str, float]:
    who, shares = _slowest(training), defaultdict[str, list[float]](list)
    usual = _usual(training)
    for records in training.steps.values():
        whole = np.sum([np.nan_to_num(column(records, part)) for part in PARTS], axis=0)
        whole = np.where(whole, whole, np.nan)
        for field, words in _PARTS.items():
            share = usual(column(records, field)) / usual(whole)
            if np.isfinite(share):
                shares[words.format(who=who)].append(share)
    parts = {words: mean(np.array(received)) for words, received in shares.items()}
    return dict(sorted(parts.items(), key=lambda pair: -pair[1]))


def _took(training: Training, *fields: str) -> dict[int, float]:
    """Return, for each rank with records, the median of the sum of some parts of a step.

    The values are in seconds.
    """
    result = {
        rank: median(np.sum([_read_part(records, field) for field in fields], axis=0))
        for rank, records in training.steps.items()
    }
    return {rank: seconds for rank, seconds in result.items() if np.isfinite(seconds)}


def _read_part(records: Sequence[JsonDict], field: str) -> Array:
    """Return the seconds of one part of each step, shape [steps].

    A missing ``t_host``, as in older records, is 0.
    """
    result = column(records, field)
    return np.nan_to_num(result) if field == "t_host" else result


def _slowest(training: Training) -> str:
    """Return the name of the rank that is ready last; "the slowest rank" if unknown."""
    ready = _took(training, "t_data", "t_compute", "t_host")
    if len(ready) < 2 or len(ready) < len(training.run.get("ranks") or ready):
        return "the slowest rank"
    return _name(training, max(ready, key=lambda rank: ready[rank]))


def _slower(training: Training, forecast: dict[str, Any]) -> tuple[str, float | None, str]:
    """Return the rank whose compute time exceeds the forecast by the largest factor.

    If every pass waits for all ranks, as in FSDP, no rank's own time is known.

    Returns:
        The name of the rank, the ratio of its time to the forecast, and the reason if it is known:
        the rank reads its samples too slowly, or shares its processors. The name is empty if no
        ratio is known, or if the largest ratio may be noise.
    """
    foreseen = _foreseen(training, forecast)
    times, excess_s = dict[int, float](), dict[int, float]()
    for rank, records in training.steps.items():
        if rank in foreseen and np.isfinite(column(records, "t_wait")).any():
            parts = [column(records, part) for part in ("t_data", "t_compute", "t_opt")]
            expected = np.array([foreseen[rank](n) if n == n else np.nan
                                 for n in column(records, "n_local").tolist()])  # fmt: skip
            took = np.sum(parts, axis=0)
            ratio = median(took / np.where(expected, expected, np.nan))
            if np.isfinite(ratio):
                times[rank], excess_s[rank] = ratio, median(took - expected)
    if not times:
        return "", None, ""
    rank = max(times, key=lambda each: times[each])
    worker = training.worker(rank)
    crowd, reason = _crowd(training, worker), ""
    if median(column(training.steps[rank], "t_data")) > excess_s[rank] / 2:
        reason = "most of that time goes to reading its samples; try another number of --workers"
    least_s = _SLOWER_GPU_S if worker.get("uuid") else _SLOWER_S
    is_clear = len(training.lead) >= _SLOWER_STEPS and excess_s[rank] > least_s
    name = _name(training, rank) if crowd or is_clear else ""
    return name, times[rank], reason or crowd


def _foreseen(training: Training, forecast: dict[str, Any]) -> dict[int, Callable[[float], float]]:
    """Return, for each rank, a function from a number of samples to the expected seconds.

    After a new split of the batch, the rank's number of samples differs from the plan.
    """
    plan, tables = training.run.get("plan") or {}, list[SpeedTable]()
    with contextlib.suppress(KeyError, TypeError, ValueError):  # a record of another version
        tables = [SpeedTable.from_json(each) for each in plan["speeds"]]
    seconds, counts = forecast.get("compute_s") or (), plan.get("counts") or ()
    result: dict[int, Callable[[float], float]] = {}
    for place, worker in enumerate(training.run.get("ranks") or ()):
        rank = worker.get("rank")
        if not isinstance(rank, int) or place >= len(seconds):
            continue
        if place < len(tables):
            result[rank] = cache(tables[place].compute_seconds)
        else:
            planned = counts[place] if place < len(counts) else 0
            result[rank] = partial(_in_proportion, seconds[place], planned)
    return result


def _in_proportion(seconds: float, planned: float, samples: float) -> float:
    return seconds * samples / planned if planned else seconds


def _crowd(training: Training, worker: dict[str, Any]) -> str:
    """Return a sentence if a rank without a GPU shares too few processors with other ranks.

    The result is empty if the host has enough processors.
    """
    host = worker.get("host")
    beside = [
        each for each in training.run.get("ranks") or ()
        if each.get("host") == host and not each.get("uuid")
    ]  # fmt: skip
    facts = [each for each in training.run.get("facts") or () if each.get("host") == host]
    cores = facts[0].get("cores") if facts else None
    if worker.get("uuid") or not cores or len(beside) <= cores:
        return ""
    return (
        f"{len(beside)} ranks share {cores} processors on this machine; on machines of their "
        "own, each rank has its own processors"
    )


def _name(training: Training, rank: int) -> str:
    host = training.worker(rank).get("host")
    return f"{host} (rank {rank})" if host else f"rank {rank}"


def _advice(told: Sequence[dict[str, Any]]) -> tuple[Advice, ...]:
    try:
        known = [Advice.from_json(each) for each in told]
    except (KeyError, TypeError):
        return ()  # a record of another version
    return tuple(sorted(known, key=lambda each: -(each.times or 0.0)))


def _sentence(advice: Advice, unit: str, off: str) -> str:
    """Return a sentence for the user, as in ``--wire powersgd:8: about +52%; it is inexact: ...``.

    Args:
        advice: the advice.
        unit: unit in which rates are counted, such as images.
        off: phrase on the error of the plan's forecast; empty if the forecast was good.
    """
    if advice.times is None:
        return f"{advice.text}."  # without a capital, as it may begin with a host's name
    price = f"; {advice.price}" if advice.price else ""
    return f"{advice.option}: about {advice.times - 1:+.0%} {unit}/s{off}{price}."


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
