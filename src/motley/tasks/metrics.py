"""Metrics of torchmetrics over all held-out samples, by the names that ``--metrics`` takes.

This module lists the names without an import of torchmetrics, because ``-h`` and the parser need
them. A name includes the kind of average over classes, as in ``f1_macro``.
"""

import argparse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motley.data.datasets import CLASS, LABELS, VALUE
from motley.registry import import_extra
from motley.text import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

_PREFIXES = {CLASS: "multiclass_", LABELS: "multilabel_", VALUE: ""}
_AVERAGES = ("macro", "micro", "weighted")


@dataclass(frozen=True)
class Measure:
    """A metric of torchmetrics for classes, labels or values.

    Attributes:
        function: name of its function in torchmetrics.functional, without ``multiclass_``.
        kinds: kinds of targets for which the metric is defined.
        more: further arguments of the function.
        is_better: ``min`` if smaller values are better, ``max`` if larger values are better.
    """

    function: str
    kinds: tuple[str, ...]
    more: tuple[tuple[str, Any], ...] = ()
    is_better: str = "max"


def _averaged(name: str, function: str, averages: Sequence[str]) -> dict[str, Measure]:
    kinds = (CLASS, LABELS)
    return {
        f"{name}_{average}": Measure(function, kinds, (("average", average),))
        for average in averages
    }


def _make() -> dict[str, Measure]:
    result = {
        "auroc": Measure("auroc", (CLASS, LABELS)),
        "average_precision": Measure("average_precision", (CLASS, LABELS)),
        "cohen_kappa": Measure("cohen_kappa", (CLASS,)),
        "mcc": Measure("matthews_corrcoef", (CLASS, LABELS)),
        "calibration_error": Measure("calibration_error", (CLASS,), is_better="min"),
        "exact_match": Measure("exact_match", (LABELS,)),
        "hamming_distance": Measure("hamming_distance", (LABELS,), is_better="min"),
        "mae": Measure("mean_absolute_error", (VALUE,), is_better="min"),
        "mse": Measure("mean_squared_error", (VALUE,), is_better="min"),
        "rmse": Measure("mean_squared_error", (VALUE,), (("squared", False),), "min"),
        "r2": Measure("r2_score", (VALUE,)),
        "pearson": Measure("pearson_corrcoef", (VALUE,)),
        "spearman": Measure("spearman_corrcoef", (VALUE,)),
        "explained_variance": Measure("explained_variance", (VALUE,)),
    }
    for name, function in (
        ("accuracy", "accuracy"), ("f1", "f1_score"), ("iou", "jaccard_index"),
        ("precision", "precision"), ("recall", "recall"), ("specificity", "specificity"),
    ):  # fmt: skip
        result |= _averaged(name, function, _AVERAGES)
    for name in ("auroc", "average_precision"):
        result |= _averaged(name, name, ("weighted",))
    return result


MEASURES: Mapping[str, Measure] = _make()
DIRECTIONS: Mapping[str, str] = {name: each.is_better for name, each in MEASURES.items()}


def metric_name(text: str) -> str:
    """Parse the name of a metric of torchmetrics, such as f1_macro."""
    if text not in MEASURES:
        raise argparse.ArgumentTypeError(
            f"there is no metric {text}{did_you_mean(text, MEASURES)}; choose "
            f"{', '.join(sorted(MEASURES))}"
        )
    return text


def compute_measures(
    names: Sequence[str], kind: str, predicted: "Tensor", target: "Tensor"
) -> dict[str, float]:
    """Return metrics of all samples, by name.

    Args:
        names: names in :data:`MEASURES`.
        kind: kind of the targets, for which all these metrics are defined.
        predicted: probabilities, [n, classes], or predicted values, [n].
        target: classes, int64 [n]; labels, 0 or 1, [n, labels]; or values, [n].

    Raises:
        MotleyError: torchmetrics is not installed.
    """
    functions = import_extra("torchmetrics.functional", "--metrics", "torchmetrics")
    counts = {CLASS: {"num_classes": predicted.shape[-1]},
              LABELS: {"num_labels": predicted.shape[-1]}}.get(kind, {})  # fmt: skip
    result = dict[str, float]()
    for name in names:
        each = MEASURES[name]
        function = getattr(functions, "classification" if _PREFIXES[kind] else "regression")
        with warnings.catch_warnings():
            # A class that does not occur is left out of an average, as the documentation says.
            warnings.simplefilter("ignore", UserWarning)
            compute = getattr(function, f"{_PREFIXES[kind]}{each.function}")
            result[name] = float(compute(predicted, target, **counts, **dict(each.more)))
    return result
