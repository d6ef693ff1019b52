"""Batches that a function makes."""

import torch

from motley.library.made_batches import MadeBatches


def test_rows_come_in_the_order_in_which_they_are_asked_for() -> None:
    made = MadeBatches(
        lambda number: {"x": torch.arange(6) + 10 * number, "scale": torch.tensor(2.0)},
        3, 0, torch.device("cpu"),
    )  # fmt: skip
    assert len(made) == 18
    for indices in ([6, 7, 8, 9, 10, 11], [8, 9], [8, 10, 9, 11]):
        part = made.take(indices)
        assert part["x"].tolist() == [index + 4 for index in indices] and part["scale"] == 2
