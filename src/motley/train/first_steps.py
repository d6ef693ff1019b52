"""Whether the wire is what the plan was made for: the first steps of a run tell."""

from datetime import datetime
from statistics import median

from motley.measure.speed_cache import WireMemory
from motley.plan.forecast import Forecast
from motley.records.training import StepRecord

_WARM_UP = 2  # steps that say nothing yet
_STEPS = 8  # whose median does
_CHANGED = 1.5  # times longer, or shorter, a step is by the wire alone: that is another wire
_WRONG = 3.0  # times: figures that foretell so badly were disturbed when they were measured


class FirstSteps:
    """Compares the wire of a run's first steps with the forecast, and keeps what that was made of
    for the next start if they agree.

    Args:
        memory: what to keep; None: nothing is to be compared.
    """

    def __init__(self, memory: WireMemory | None = None, forecast: Forecast | None = None) -> None:
        self._memory, self._forecast = memory, forecast
        self._seen = 0
        self._took_s: list[float] = []  # of steps, as they would be with the wire of now

    def step(self, record: StepRecord) -> str:
        """Take in a step of the first rank that trains.

        Returns:
            What is to be said; mostly nothing.
        """
        if self._memory is None or self._forecast is None:
            return ""
        if record.n_global != self._forecast.global_batch:
            return ""  # a ragged one
        self._seen += 1
        if self._seen > _WARM_UP:
            self._took_s.append(_took_s(record, self._forecast))
        return self.end() if len(self._took_s) == _STEPS else ""

    def end(self) -> str:
        """The run ends well, or has been seen for long enough.

        Returns:
            As :meth:`step`.
        """
        memory, self._memory = self._memory, None
        if memory is None or self._forecast is None:
            return ""
        expected = self._forecast.step_s
        took = median(self._took_s) if self._took_s else expected * memory.figures.steps_took
        if not memory.is_old:
            if expected / _WRONG < took < expected * _WRONG:
                memory.keep(took / expected)
            return ""
        # As much off as when they were measured, they still hold.
        before = memory.figures.steps_took
        expected *= before
        if expected / _CHANGED < took < expected * _CHANGED:
            memory.keep(before)
            return ""
        when = datetime.fromtimestamp(memory.figures.measured)
        return (
            f"the links are not what they were on {when:%Y-%m-%d %H:%M}: with what they carry now "
            f"a step takes {took:.3g} s, and {expected:.3g} s was expected; they are measured anew "
            "at the next start"
        )


def _took_s(record: StepRecord, forecast: Forecast) -> float:
    """Seconds of a step if ranks computed as foretold; where an engine cannot tell computing and
    sending apart, of the step."""
    if record.t_comm is None:
        return record.n_global / record.samples_per_s
    return forecast.step_s - forecast.exposed_s + record.t_comm
