"""The decision to end a running job at a step boundary and to go on with hosts that are back."""

from collections.abc import Sequence
from dataclasses import dataclass

from motley.errors import MotleyError


def step_with(batch: int, step_s: float, rates: Sequence[float]) -> float:
    """Compute the seconds that a step takes once more hosts share its batch.

    Each host's samples a second add up, as of a split by speed; what the wire costs is in what was
    measured, and taken to stay as it is.

    Args:
        batch: samples in a step, of all ranks. step_s: what it takes now.
        rates: samples a second of each host that is added.

    Raises:
        MotleyError: a number is not above 0.
    """
    if batch < 1 or step_s <= 0 or any(rate <= 0 for rate in rates):
        raise MotleyError(f"a step of {batch} samples in {step_s} s, and hosts of {rates} a second")
    return batch / (batch / step_s + sum(rates))


@dataclass(frozen=True)
class ReadmissionEstimate:
    """The seconds that a readmission saves and costs.

    Attributes:
        steps: left in the run. step_s: seconds of each now. with_s: with the hosts that are back.
        cost_s: seconds without a step, while the job ends and starts again.
    """

    steps: int
    step_s: float
    with_s: float
    cost_s: float

    @property
    def saves_s(self) -> float:
        """Seconds saved in the rest of the run."""
        return self.steps * (self.step_s - self.with_s)

    @property
    def worth_it(self) -> bool:
        """True if the run ends sooner."""
        return self.saves_s > self.cost_s

    def sentence(self) -> str:
        """Return the figures as a sentence."""
        saved = f"{self.saves_s:.0f} s" if self.saves_s > 0 else "nothing"
        return (
            f"that saves {saved} of the {self.steps * self.step_s:.0f} s left ({self.steps} steps "
            f"of {self.step_s:.3g} s, {self.with_s:.3g} s with it), and a new start costs "
            f"{self.cost_s:.0f} s"
        )
