"""The event of other shares, and the devices that the re-planner takes for equal."""

from types import SimpleNamespace
from typing import Any

import pytest

from motley.comm.modes.numbers import EXACT
from motley.plan.plan import make_plan
from motley.plan.replan import Device, Proposal
from motley.train.agreement import rebalance
from motley.train.setup import _watch


def recorded(proposal: Proposal) -> tuple[str, dict[str, Any]]:
    """Return the words and the numbers of the event."""
    found: list[Any] = []
    recorder: Any = SimpleNamespace(note=lambda event, text, **more: found.append((text, more)))
    plan: Any = make_plan(90, (60, 30), (30, 30), EXACT)
    state: Any = SimpleNamespace(step=7)
    assert rebalance(plan, proposal, recorder, state).counts == proposal.counts
    return found[0]


def test_other_shares_are_explained() -> None:
    text, numbers = recorded(Proposal((45, 45), (2.0, 1.0), 0.25))
    assert "take 45 + 45 samples (before: 60 + 30)" in text and "saves 25%" in text
    assert numbers["taken_back"] is None and numbers["gain"] == 0.25


@pytest.mark.parametrize(("came", "words"), [(0.02, "saved 2%"), (-0.1, "saved nothing")])
def test_shares_that_are_taken_back_say_what_they_brought(came: float, words: str) -> None:
    text, numbers = recorded(Proposal((45, 45), (1.0, 1.0), 0.0, (0.12, came)))
    assert "was to save 12%" in text and words in text
    assert numbers["taken_back"] == (0.12, came)


def test_equal_gpus_of_a_host_are_one_model() -> None:
    def worker(rank: int, host: str, uuid: str, precision: str = "bf16") -> Any:
        device = f"cuda:{rank} NVIDIA H100" if uuid else "cpu"
        return SimpleNamespace(host=host, uuid=uuid, device=device, precision=precision)

    workers: Any = [
        worker(0, "a", "GPU-0"), worker(1, "a", "GPU-1"), worker(2, "a", "GPU-2", "fp32"),
        worker(0, "b", "GPU-3"), worker(0, "c", ""), worker(1, "c", ""),
    ]  # fmt: skip
    monitor: Any = lambda speeds, kinds: kinds  # noqa: E731
    planned: Any = SimpleNamespace(
        speeds=(), plan=SimpleNamespace(max_micro_batch=(32,) * len(workers))
    )
    config: Any = SimpleNamespace(replan="auto")
    engine: Any = SimpleNamespace(equal_micro_steps=False)
    kinds: Any = _watch(monitor, planned, config, engine, workers)
    assert all(isinstance(kind, Device) for kind in kinds)
    models = [kind.model for kind in kinds]
    assert models[0] == models[1] and models[4] == models[5] and len(set(models)) == 4
    assert [kind.name for kind in kinds] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3", "c", "c"]
