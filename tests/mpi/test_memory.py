"""Memory ends on one rank in mid-run: the step is done again, and the model stays the same."""

import pytest
from jobs import Jobs, Trained
from project import DDP

pytestmark = pytest.mark.mpi

OPTIONS = ("--precision", "fp32", "--shares", "1,1", "--batch-size", 512, "--max-steps", 12)


@pytest.fixture(scope="module")
def enough(module_jobs: Jobs) -> Trained:
    """The same run with memory enough."""
    return module_jobs.train(2, DDP, "enough", *OPTIONS)


@pytest.mark.turns
@pytest.mark.parametrize(
    "words",
    [(), ("--no-overlap",), ("--late",), ("--stage", 1)],
    ids=["ddp", "no_overlap", "late", "zero1"],
)
def test_a_rank_short_of_memory_halves_its_micro_batch(
    enough: Trained, jobs: Jobs, words: tuple[str, ...]
) -> None:
    # In a forward pass, then in a backward pass when DDP has sent a part of the gradient.
    run = jobs.train(2, "tests/support/drivers/squeezed.py", "short", *OPTIONS, *words)
    assert run.losses == pytest.approx(enough.losses, rel=2e-6)
    assert run.run["result"]["top1"] == enough.run["result"]["top1"]

    first, second = [event for event in run.events if event["event"] == "out_of_memory"]
    (name,) = first["found"]
    assert name.startswith("rank 1 on ") and "can't allocate memory" in first["found"][name]
    assert (first["before"], first["after"]) == ({name: 256}, {name: 128})
    # The batch in which memory ends again may be the smaller one at the end of an epoch.
    assert second["after"][name] == second["before"][name] // 2 in (51, 64)
    assert f"at most 128 (before: 256) on {name}" in run.done.output
    assert [step["n_local"] for step in run.steps(1)] == [step["n_local"] for step in
                                                          enough.steps(1)]  # fmt: skip


def test_local_steps_go_on_and_halve_it_when_all_have_heard(jobs: Jobs) -> None:
    run = jobs.train(2, "tests/support/drivers/squeezed.py", "short", *OPTIONS, "--wire", "local:2")
    first, second = [event for event in run.events if event["event"] == "out_of_memory"]
    (name,) = first["found"]
    assert name.startswith("rank 1 on ") and f"at most 128 (before: 256) on {name}" in first["text"]
    assert "before step 7" in first["text"] and "before step 10" in second["text"]
    assert (second["before"], second["after"]) == ({name: 128}, {name: 64})
    assert [step["step"] for step in run.steps()] == list(range(12))
    assert not [event for event in run.events if event["event"] == "drift"]
