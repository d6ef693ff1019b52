"""The held-out samples with the largest loss."""

import torch

from motley.tasks.task import Task
from motley.tasks.worst import WorstSamples


class Rows(Task):
    def data(self, held_out: bool) -> range:
        return range(9)


def test_the_largest_losses_per_weight_are_kept_over_batches() -> None:
    worst = WorstSamples(2)
    worst.add([4, 1, 7], {"loss": torch.tensor([8.0, 6.0, 5.0])}, None, torch.tensor([8, 2, 5]))
    worst.add([0, 3], {"loss": torch.tensor([2.0, 4.0])}, None, torch.tensor([1, 4]))
    found = [(each["index"], each["loss"]) for each in worst.describe(Rows())]
    assert found == [(1, 3.0), (0, 2.0)]
    worst.add([8, 2], {"loss": torch.tensor([2.5, float("nan")])}, None)
    assert [each["loss"] for each in worst.describe(Rows())] == [None, 3.0]
