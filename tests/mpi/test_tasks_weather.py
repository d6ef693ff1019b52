"""Aurora is exact: on any shares, sharded or not, with its layers computed again."""

import pytest
from jobs import Jobs, Trained
from project import DDP

pytestmark = pytest.mark.mpi

WEATHER = ("--task", "weather", "--embed-dim", 64, "--depths", "1,1", "--levels", "500,850",
           "--grid", "9x16", "--states", 60, "--batch-size", 8, "--eval-samples", 4,
           "--max-steps", 5, "--precision", "fp32", "--warmup-epochs", 0)  # fmt: skip
SHARES = ("--shares", "5,0,3")
RUNS = {
    "DDP": SHARES,
    "FSDP": (*SHARES, "--strategy", "fsdp"),
    "layers computed again": (
        *SHARES, "--micro-batch", 2, "--grad-checkpointing",
        "Basic3DEncoderLayer,Basic3DDecoderLayer",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(module_jobs: Jobs) -> Trained:
    """One rank, the whole batch at once."""
    return module_jobs.train(1, DDP, "alone", *WEATHER)


@pytest.mark.turns
@pytest.mark.parametrize("name", RUNS)
def test_aurora_is_learnt_as_by_one_rank(module_jobs: Jobs, alone: Trained, name: str) -> None:
    run = module_jobs.train(3, DDP, name, *WEATHER, *RUNS[name])
    # The first steps: an absolute error has a jump in its gradient, and AdamW takes a whole step
    # where that is next to nothing, so that later ones part.
    assert run.losses[:2] == pytest.approx(alone.losses[:2], rel=2e-6)
    first = [each.steps()[0]["grad_norm"] for each in (run, alone)]
    assert first[0] == pytest.approx(first[1], rel=2e-6)
    assert run.losses == pytest.approx(alone.losses, rel=1e-3)
    assert run.losses[-1] < run.losses[0]
    assert run.run["task"]["title"].endswith("on 9x16, 2 levels, of synthetic waves")
    ends = [each.run["result"]["rmse_2t"] for each in (run, alone)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-2)
