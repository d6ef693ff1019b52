"""Memory that is given back, and what is computed in halves where it ends."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from motley.data.source import Batch, Tensors
from motley.engines.out_of_memory import release, release_all, set_aside
from motley.engines.step import StepEngine
from motley.train.evaluation import order_rows


class Narrow(nn.Module):
    """Has memory for three images."""

    score_names = ("loss", "top1")
    task = SimpleNamespace(gathered=("value",))

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[Any] = []
        self.worst = None

    def forward(self, data: Tensors, scored: bool) -> dict[str, Tensor]:
        """No loss; an answer is the image's own value."""
        if len(data["images"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        right = data["images"] == data["labels"]
        return {"loss": torch.zeros(len(right)), "top1": right, "value": data["images"]}


def test_what_does_not_fit_is_evaluated_in_halves() -> None:
    engine = object.__new__(StepEngine)
    engine._model = Narrow()
    values = torch.tensor([0, 1, 2, 3, 0, 1, 2], dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 3, 0, 0, 0])
    assert engine.evaluate(
        Batch({"images": values, "labels": labels}, tuple(range(7)))
    ).tolist() == [0, 5, 7, 7]
    assert order_rows(engine._model.gathered)["value"].tolist() == values.tolist()


def held_by_itself() -> weakref.ref[nn.Module]:
    """A module that only a collection frees."""
    module = nn.Module()
    vars(module)["itself"] = module
    return weakref.ref(module)


def test_a_pass_that_failed_is_let_go_of_without_a_look_at_what_was_set_aside() -> None:
    before = held_by_itself()
    gc.freeze()
    found = held_by_itself()
    release()
    assert found() is None and before() is not None
    release_all()
    assert before() is None
    set_aside()
    assert gc.get_freeze_count() > 0
