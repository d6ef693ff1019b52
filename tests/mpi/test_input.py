"""A rank that waits for its samples: that is foreseen, and said with what helps."""

import statistics
from pathlib import Path

import pytest
from jobs import Jobs

pytestmark = pytest.mark.mpi

# As from a slow disk: it takes its time, and no processor.
SLOW_TASK = """
import time
from dataclasses import dataclass
import torch
from torch import nn
from motley.tasks.task import Task

@dataclass
class Slow(Task):
    def model(self):
        return nn.Linear(4, 1)

    def data(self, held_out):
        return range(8 if held_out else 100)

    def sample(self, item, training):
        time.sleep(0.02)
        x = torch.randn(4, generator=torch.Generator().manual_seed(item))
        return {"x": x, "y": x.sum()}

    def losses(self, net, batch):
        return (net(batch["x"]).squeeze(1) - batch["y"]) ** 2
"""


@pytest.mark.parametrize("workers", [(), ("--workers", 1)], ids=["before", "beside"])
def test_a_run_bound_by_its_input_takes_as_long_as_forecast(
    jobs: Jobs, tmp_path: Path, workers: tuple[object, ...]
) -> None:
    task = tmp_path / "slow.py"
    task.write_text(SLOW_TASK)
    words = ("--task", task, "--batch-size", 10, "--max-steps", 12, *workers)
    trained = jobs.train(1, "torch_dist/train.py", "slow", *words)
    plan = trained.run["plan"]
    (speed,) = plan["speeds"]
    assert speed["reads_ahead"] == bool(workers) and speed["readers"] == len(workers) // 2
    forecast = plan["forecast"]["step_s"]
    # The first batches are read before the first step, or while it is waited for. The model takes
    # 1 ms, behind each read or beside it.
    took = statistics.median(step["t_data"] for step in trained.steps()[4:])
    assert 10 * 0.02 < forecast == pytest.approx(took, rel=0.1)
    said = [each for each in trained.done.output.splitlines() if "input limits" in each]
    line, _ = said  # with the plan, and with what the run reached
    assert ("--workers 1" in line) != bool(workers)
    assert "--dataset packed" not in line, "these samples are no images"
    expected = next(each for each in trained.done.output.splitlines() if "expected:" in each)
    assert "A step loses" in expected and " s to input" in expected
