"""Metrics of all held-out samples: their numbers, their names, and what is refused."""

import argparse
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from sklearn import metrics as sk

from motley.config.options import Config
from motley.errors import MotleyError
from motley.tasks.metrics import CLASS, LABELS, MEASURES, VALUE, compute_measures, metric_name
from motley.tasks.model import TaskModel, compute_metrics, select_gathered
from motley.tasks.task import Task
from motley.train.best import list_metrics
from motley.train.evaluation import order_rows


def test_they_are_those_of_another_library() -> None:
    dice = torch.Generator().manual_seed(3)
    chances = torch.rand(80, 4, generator=dice).softmax(dim=1)
    target = torch.arange(80) % 4
    found = compute_measures(["f1_macro", "auroc", "mcc"], CLASS, chances, target)
    predicted = chances.argmax(dim=1)
    assert found["f1_macro"] == pytest.approx(sk.f1_score(target, predicted, average="macro"))
    assert found["mcc"] == pytest.approx(sk.matthews_corrcoef(target, predicted))
    auroc = sk.roc_auc_score(target, chances, multi_class="ovr")
    assert found["auroc"] == pytest.approx(auroc)
    several = (torch.rand(80, 4, generator=dice) > 0.5).long()
    found = compute_measures(["average_precision", "f1_micro"], LABELS, chances, several)
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(several, chances))
    found = compute_measures(["rmse", "r2"], VALUE, chances[:, 0], chances[:, 1])
    assert found["r2"] == pytest.approx(sk.r2_score(chances[:, 1], chances[:, 0]), rel=1e-5)
    assert found["rmse"] == pytest.approx(
        float((chances[:, 0] - chances[:, 1]).square().mean()) ** 0.5
    )


def test_every_name_is_a_function_of_torchmetrics() -> None:
    chances, target = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.2, 0.8]]), torch.tensor([0, 1, 1])
    for kind, values in ((CLASS, (chances, target)), (LABELS, (chances, (chances > 0.5).long())),
                         (VALUE, (chances[:, 0], target.float()))):  # fmt: skip
        names = [name for name, each in MEASURES.items() if kind in each.kinds]
        assert set(compute_measures(names, kind, *values)) == set(names)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"no metric f1_makro \(nearest: f1_macro"):
        metric_name("f1_makro")


def test_rows_of_all_ranks_come_in_the_order_of_the_samples() -> None:
    parts = [
        ((4, 1), {"x": torch.tensor([[4.0], [1.0]]), "text": ["four", "one"]}),
        ((0,), {"x": torch.tensor([[0.0]]), "text": ["zero"]}),
    ]
    found = order_rows(parts)
    assert found["x"].tolist() == [[0.0], [1.0], [4.0]]
    assert found["text"] == ["zero", "one", "four"]
    uneven = [((1,), {"x": torch.ones(1, 2)}), ((0,), {"x": torch.zeros(1, 3)})]
    assert [len(row) for row in order_rows(uneven)["x"]] == [3, 2]


class Judged(Task):
    """A task of one weight, with metrics."""

    gathered = ("x",)

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def data(self, held_out: bool) -> Any:
        return [{"x": torch.ones(1)}] * 2

    def losses(self, net: Any, batch: Any) -> torch.Tensor:
        return net(batch["x"])[:, 0]

    def scores(self, net: Any, batch: Any) -> Any:
        return {"loss": self.losses(net, batch), "x": batch["x"]}

    def compute_metrics(self, gathered: Mapping[str, Any]) -> Any:
        return self._metrics(gathered)


def known(metrics: Any) -> list[str]:
    task = Judged(metrics)
    model = TaskModel(task, task.model(), "fp32", torch.device("cpu"))
    assert model.score_names == ("loss",)
    return list_metrics(model, Config(model_ema=True))


def test_a_tasks_own_metrics_are_known_before_training_or_fail_there() -> None:
    assert known(lambda found: {"auroc": len(found["x"])}) == [
        "loss", "auroc", "ema_loss", "ema_auroc",
    ]  # fmt: skip

    def one_class(found: Any) -> Any:
        raise ValueError("one class alone")

    assert known(one_class) == []  # a single sample may have no such metric
    with pytest.raises(MotleyError, match="of Judged raises NameError: name 'sklern'"):
        known(lambda found: sklern.roc(found))  # type: ignore[name-defined]  # noqa: F821
    with pytest.raises(
        MotleyError, match="of Judged returns a float; return a dictionary of numbers by name"
    ):
        known(lambda found: 0.5)
    with pytest.raises(MotleyError, match="returns a value that is not a number"):
        compute_metrics(Judged(lambda found: {"a": "good"}), {})


def test_rows_that_do_not_fit_the_samples_are_refused() -> None:
    task = Judged(None)
    with pytest.raises(MotleyError, match=r"names 'x', but scores\(\) returns only y"):
        select_gathered(task, {"y": torch.ones(2)}, 2)
    with pytest.raises(MotleyError, match="returns 'x' with 3 rows for 2 samples"):
        select_gathered(task, {"x": ["a", "b", "c"]}, 2)
    with pytest.raises(MotleyError, match="returns 'x' with no rows for 2 samples"):
        select_gathered(task, {"x": torch.tensor(1.0)}, 2)
