"""Of more ranks than may each write records, the first tells of all."""

import pytest
from jobs import Jobs

pytestmark = pytest.mark.mpi

RANKS = 4  # the driver lets three write


def test_of_many_ranks_the_first_alone_writes_steps(jobs: Jobs) -> None:
    run = jobs.train(
        RANKS, "tests/support/drivers/few_writers.py", "many", "--shares", "equal",
        "--batch-size", 2 * RANKS, "--max-steps", 3, "--eval-images", 10,
    )  # fmt: skip
    assert [path.name for path in run.folder.glob("steps.*")] == ["steps.rank0.jsonl"]
    assert len([*run.folder.glob("done.*")]) == RANKS
    first, *_ = steps = run.steps()
    assert [step["step"] for step in steps] == [0, 1, 2]
    others = first["others_ready"]
    assert others["least"]["ready_s"] <= others["middle"]["ready_s"] <= others["largest"]["ready_s"]
    assert {each["n_local"] for each in others.values()} == {2}
    assert 0 not in {each["rank"] for each in others.values()}
    # A part of the host's time may come after the exchange.
    least = first["t_data"] + first["t_compute"]
    met = first["t_wait"] + first["t_comm"]  # whoever began late did not wait for all of it
    waits = [
        min(met, max(0.0, others["largest"]["ready_s"] - ready))
        for ready in (least + first["t_host"], least)
    ]
    assert waits[0] - 1e-6 <= first["t_wait"] <= waits[1] + 1e-6
