"""The kinds of target of an image: class, labels or value, each with its loss and metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from motley.data.datasets import CLASS, LABELS, VALUE
from motley.data.images import NO_LABEL
from motley.tasks.metrics import compute_measures
from motley.tasks.task import LABEL, PREDICTED

PROBABILITIES, TARGETS = "probabilities", "targets"  # gathered of all held-out images
_TOP = 5  # classes among which the label is, for the metric top5
_LIKELY = 0.5  # probability from which a label is predicted
_JSD_WEIGHT = 12.0  # of the divergence beside the cross-entropy, as in AugMix and timm
_JSD_LEAST = 1e-7  # smallest probability of which a logarithm is taken, as in timm
Scores = dict[str, Tensor]


class Target(Protocol):
    """A kind of target of an image, with the loss and metrics that belong to it.

    Attributes:
        kind: ``class``, ``labels`` or ``value``.
        names: names of the classes or labels; empty if they have none.
    """

    kind: str
    names: Sequence[str]

    @property
    def gathers(self) -> bool:
        """True if metrics need the outputs of all held-out images together."""

    def stack(self, labels: Sequence[Any]) -> Tensor:
        """Return the labels of a batch as a tensor with one row for each image."""

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the training loss of each image, [n]."""

    def mixed_losses(
        self, outputs: Tensor, labels: Tensor, partners: Tensor, own: Tensor
    ) -> Tensor:
        """Return the training loss of each mixed image, [n].

        Args:
            outputs: outputs of the model.
            labels: label of each image.
            partners: label of the second image with which each image is mixed.
            own: weight of ``labels``, fp32 [n]. The weight of ``partners`` is 1 - ``own``.
        """
        return own * self.losses(outputs, labels) + (1 - own) * self.losses(outputs, partners)

    def consistency_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return AugMix's loss of each sample, [n], which is the sum of two terms.

        The first term is the cross-entropy of the first image. The second term is 12 times the
        Jensen-Shannon divergence of the predictions for all images of the sample. Source:
        Hendrycks et al., "AugMix", 2020; timm's JsdCrossEntropy.

        Args:
            outputs: outputs of the model, [n, images of a sample, classes].
            labels: label of each sample.
        """
        chances = outputs.softmax(dim=2)
        mixture = chances.mean(dim=1, keepdim=True).clamp(_JSD_LEAST, 1).log()
        apart = functional.kl_div(mixture.expand_as(chances), chances, reduction="none").sum(dim=2)
        return self.losses(outputs[:, 0], labels) + _JSD_WEIGHT * apart.mean(dim=1)

    def weights(self, labels: Tensor) -> Tensor | None:
        """Return the weight of each image in the mean loss, [n], on the CPU; None: 1 each."""

    def scores(self, outputs: Tensor, labels: Tensor) -> Scores:
        """Return the scores of held-out images by name, [n] each; see ``Task.scores``."""

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation, given the mean of each score."""

    def compute_metrics(self, probabilities: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics that need the outputs of all held-out images together."""

    def columns(self, outputs: Tensor, labels: Tensor) -> dict[str, list[Any]]:
        """Return predictions as the columns of a table."""

    def rank(self, outputs: Tensor, top_k: int) -> list[dict[str, Any]]:
        """Return a prediction for each image, with the most probable classes first."""

    def describe(self, scores: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the label and the prediction of an image, given the image's scores."""


@dataclass
class ClassTarget(Target):
    """The kind of target with one class for each image.

    Attributes:
        smoothing: label smoothing.
        weight: weight of each class, fp32 [classes]; None: 1 each.
        measures: names of further metrics.
        is_binary: True: the training loss is the binary cross-entropy of each class, as in timm.
        threshold: if ``is_binary`` is True, targets above this number become 1, and all other
            targets become 0. None: targets stay as they are.
    """

    names: Sequence[str]
    smoothing: float
    weight: Tensor | None
    measures: Sequence[str]
    is_binary: bool = False
    threshold: float | None = None
    kind: str = CLASS

    @property
    def gathers(self) -> bool:
        """True if metrics need the outputs of all held-out images together."""
        return bool(self.measures)

    def stack(self, labels: Sequence[Any]) -> Tensor:
        """Return the labels of a batch as a tensor with one row for each image."""
        return torch.tensor(labels, dtype=torch.int64)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the training loss of each image, [n].

        With class weights, the losses are the summands of torch's weighted cross-entropy, before
        their sum is divided by the sum of the weights.
        """
        weight = None if self.weight is None else self.weight.to(outputs)
        if self.is_binary:
            return self._binary(outputs, self._soft(outputs, labels), self._weigh(labels))
        return functional.cross_entropy(
            outputs, labels, weight, label_smoothing=self.smoothing, reduction="none"
        )

    def mixed_losses(
        self, outputs: Tensor, labels: Tensor, partners: Tensor, own: Tensor
    ) -> Tensor:
        """Return the training loss of each mixed image, [n].

        ``threshold`` applies to the targets after mixing, as in timm.
        """
        if not self.is_binary:
            return super().mixed_losses(outputs, labels, partners, own)
        part, weight = own.unsqueeze(1), self._weigh(labels)
        soft = part * self._soft(outputs, labels) + (1 - part) * self._soft(outputs, partners)
        if weight is not None and (other := self._weigh(partners)) is not None:
            weight = own * weight + (1 - own) * other
        return self._binary(outputs, soft, weight)

    def _soft(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return smoothed targets, [n, classes], as in timm."""
        off = self.smoothing / outputs.shape[1]
        soft = torch.full_like(outputs, off)
        return soft.scatter_(1, labels.unsqueeze(1), 1 - self.smoothing + off)

    def _weigh(self, labels: Tensor) -> Tensor | None:
        return None if self.weight is None else self.weight.to(labels.device)[labels]

    def _binary(self, outputs: Tensor, soft: Tensor, weight: Tensor | None) -> Tensor:
        """Return the mean binary cross-entropy over the classes of each image, [n]."""
        if self.threshold is not None:
            soft = (soft > self.threshold).to(outputs)
        losses = functional.binary_cross_entropy_with_logits(outputs, soft, reduction="none")
        result = losses.mean(dim=1)
        return result if weight is None else result * weight

    def weights(self, labels: Tensor) -> Tensor | None:
        """Return the weight of each image in the mean loss, [n], on the CPU. None: 1 each."""
        return None if self.weight is None else self.weight[labels]

    def scores(self, outputs: Tensor, labels: Tensor) -> Scores:
        """Return the scores of held-out images by name, [n] each.

        The loss has no label smoothing and no class weights.
        """
        chances = outputs.softmax(dim=1)
        predicted = outputs.argmax(dim=1)
        result = {
            "loss": functional.cross_entropy(outputs, labels, reduction="none"),
            "top1": predicted == labels, LABEL: labels, PREDICTED: predicted,
            "confidence": chances.amax(dim=1),
        }  # fmt: skip
        if outputs.shape[1] >= _TOP:
            best = outputs.topk(_TOP, dim=1).indices
            result["top5"] = (best == labels.unsqueeze(1)).any(dim=1)
        if self.gathers:
            result |= {PROBABILITIES: chances, TARGETS: labels}
        return result

    def describe(self, scores: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the label and the prediction of an image, given the image's scores."""
        label, predicted = int(scores[LABEL]), int(scores[PREDICTED])
        return {
            LABEL: self.names[label] if self.names else label,
            PREDICTED: self.names[predicted] if self.names else predicted,
            "probability": float(scores["confidence"]),
            "label_probability": math.exp(-float(scores["loss"])),
        }

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation, with ``top5`` if there are enough classes."""
        return {name: means[name] for name in ("top1", "top5", "loss") if name in means}

    def compute_metrics(self, probabilities: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics that need the outputs of all held-out images together."""
        return compute_measures(self.measures, CLASS, probabilities, targets)

    def columns(self, outputs: Tensor, labels: Tensor) -> dict[str, list[Any]]:
        """Return predictions as the columns of a table.

        The column ``label`` is empty for an image without a label.
        """
        best = outputs.softmax(dim=1).max(dim=1)
        known: list[int] = labels.tolist()
        predicted: list[int] = best.indices.tolist()
        columns: dict[str, list[Any]] = {
            "label": ["" if label == NO_LABEL else label for label in known],
            "predicted": predicted,
            "confidence": [f"{value:.4f}" for value in best.values.tolist()],
        }
        if names := self.names:
            columns["label_name"] = ["" if label == NO_LABEL else names[label] for label in known]
            columns["predicted_name"] = [names[label] for label in predicted]
        return columns

    def rank(self, outputs: Tensor, top_k: int) -> list[dict[str, Any]]:
        """Return a prediction for each image, with the most probable classes first."""
        return [{"classes": each} for each in _rank(outputs.softmax(dim=1), self.names, top_k)]


def _rank(probabilities: Tensor, names: Sequence[str], top_k: int) -> list[list[dict[str, Any]]]:
    """Return the most probable classes of each image, with the probability of each class."""
    best = probabilities.topk(min(top_k, probabilities.shape[1]), dim=1)
    return [
        [
            {"class": names[label] if names else label, "probability": round(value, 6)}
            for label, value in zip(*pair, strict=True)
        ]
        for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


@dataclass
class LabelsTarget(Target):
    """The kind of target with any number of labels for each image.

    The model predicts a separate probability for each label.

    Attributes:
        weight: for each label, the factor on the loss of images that have the label, fp32
            [labels]. None: all factors are 1.
        measures: names of further metrics.
    """

    names: Sequence[str]
    weight: Tensor | None
    measures: Sequence[str]
    kind: str = LABELS

    @property
    def gathers(self) -> bool:
        """True if metrics need the outputs of all held-out images together."""
        return True

    def stack(self, labels: Sequence[Any]) -> Tensor:
        """Return the labels of a batch, [n, labels].

        An image whose labels are unknown has NO_LABEL for each label.
        """
        rows = torch.full((len(labels), len(self.names)), float(NO_LABEL))
        for row, label in zip(rows, labels, strict=True):
            if not isinstance(label, int):
                row.copy_(torch.as_tensor(label))
        return rows

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean binary cross-entropy over the labels of each image, [n]."""
        weight = None if self.weight is None else self.weight.to(outputs)
        return functional.binary_cross_entropy_with_logits(
            outputs, labels.to(outputs), pos_weight=weight, reduction="none"
        ).mean(dim=1)

    def weights(self, labels: Tensor) -> Tensor | None:
        """Return the weight of each image in the mean loss, [n], on the CPU. None: 1 each."""
        return None

    def scores(self, outputs: Tensor, labels: Tensor) -> Scores:
        """Return the scores of held-out images by name, [n] each.

        The score ``accuracy`` is the fraction of an image's labels that are predicted correctly.
        """
        losses = functional.binary_cross_entropy_with_logits(
            outputs, labels.to(outputs), reduction="none"
        )
        probabilities = outputs.sigmoid()
        right = (probabilities >= _LIKELY) == (labels >= _LIKELY)
        return {
            "loss": losses.mean(dim=1), "accuracy": right.float().mean(dim=1),
            "exact": right.all(dim=1), PROBABILITIES: probabilities, TARGETS: labels,
        }  # fmt: skip

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation, given the mean of each score."""
        return {name: means[name] for name in ("accuracy", "exact", "loss")}

    def compute_metrics(self, probabilities: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics in ``measures``, and the mean average precision.

        The mean is over the labels that at least one image has.
        """
        from sklearn.metrics import average_precision_score  # type: ignore[import-untyped]

        known = targets.sum(dim=0) > 0
        means = [
            float(average_precision_score(targets[:, each], probabilities[:, each]))
            for each in known.nonzero().flatten().tolist()
        ]
        result = {"map": sum(means) / len(means)} if means else {"map": float("nan")}
        return result | compute_measures(self.measures, LABELS, probabilities, targets.long())

    def _join(self, rows: Tensor) -> list[str]:
        """Return for each row the names of the labels with a value above 0.5, joined by ``|``."""
        return [
            "|".join(name for name, value in zip(self.names, row, strict=True) if value >= _LIKELY)
            for row in rows.tolist()
        ]

    def describe(self, scores: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the label and the prediction of an image, given the image's scores."""
        rows = torch.stack([scores[TARGETS], scores[PROBABILITIES]])
        return dict(zip((LABEL, PREDICTED), self._join(rows), strict=True))

    def columns(self, outputs: Tensor, labels: Tensor) -> dict[str, list[Any]]:
        """Return predictions as the columns of a table. Labels are separated by ``|``."""
        probabilities = outputs.sigmoid()
        return {
            "label": self._join(labels), "predicted": self._join(probabilities),
            **{f"{name}_probability": [f"{value:.4f}" for value in column]
               for name, column in zip(self.names, probabilities.T.tolist(), strict=True)},
        }  # fmt: skip

    def rank(self, outputs: Tensor, top_k: int) -> list[dict[str, Any]]:
        """Return the predicted labels and the ``top_k`` most probable labels of each image."""
        probabilities = outputs.sigmoid()
        ranked = _rank(probabilities, self.names, top_k)
        return [
            {
                "labels": [name for name, value in zip(self.names, row, strict=True)
                           if value >= _LIKELY],
                "classes": own,
            }
            for row, own in zip(probabilities.tolist(), ranked, strict=True)
        ]  # fmt: skip


@dataclass
class ValueTarget(Target):
    """The kind of target with one number for each image.

    Attributes:
        loss: ``mse``, the squared error, or ``l1``, the absolute error.
        measures: names of further metrics.
    """

    loss: str
    measures: Sequence[str]
    names: Sequence[str] = ()
    kind: str = VALUE

    @property
    def gathers(self) -> bool:
        """True if metrics need the outputs of all held-out images together."""
        return bool(self.measures)

    def stack(self, labels: Sequence[Any]) -> Tensor:
        """Return the values of a batch, [n]. An image without a known value has NaN."""
        known = [label if isinstance(label, float) else math.nan for label in labels]
        return torch.tensor(known, dtype=torch.float32)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the training loss of each image, [n]."""
        error = outputs[:, 0] - labels
        return error.abs() if self.loss == "l1" else error.square()

    def weights(self, labels: Tensor) -> Tensor | None:
        """Return the weight of each image in the mean loss, [n], on the CPU. None: 1 each."""
        return None

    def scores(self, outputs: Tensor, labels: Tensor) -> Scores:
        """Return the scores of held-out images by name, [n] each.

        Squares are in fp64, because the computation of R2 subtracts sums of squares.
        """
        label, error = labels.double(), (outputs[:, 0] - labels).double()
        result = {
            "loss": self.losses(outputs, labels), "mae": error.abs(), "squares": error.square(),
            "label_sum": label, "label_squares": label.square(), "output": outputs[:, 0],
        }  # fmt: skip
        return result | ({PROBABILITIES: outputs[:, 0], TARGETS: labels} if self.gathers else {})

    def describe(self, scores: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the label and the prediction of an image, given the image's scores."""
        return {LABEL: float(scores["label_sum"]), PREDICTED: float(scores["output"])}

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation. R2 is NaN if all labels are equal."""
        spread = means["label_squares"] - means["label_sum"] ** 2
        return {
            "mae": means["mae"], "rmse": means["squares"] ** 0.5,
            "r2": 1 - means["squares"] / spread if spread > 0 else float("nan"),
            "loss": means["loss"],
        }  # fmt: skip

    def compute_metrics(self, probabilities: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics that need the outputs of all held-out images together."""
        return compute_measures(self.measures, VALUE, probabilities, targets)

    def columns(self, outputs: Tensor, labels: Tensor) -> dict[str, list[Any]]:
        """Return predictions as the columns of a table."""
        known: list[float] = labels.tolist()
        return {
            "label": ["" if math.isnan(label) else label for label in known],
            "predicted": [f"{value:.6g}" for value in outputs[:, 0].tolist()],
        }

    def rank(self, outputs: Tensor, top_k: int) -> list[dict[str, Any]]:
        """Return a prediction for each image, with the most probable classes first."""
        return [{"value": float(f"{value:.6g}")} for value in outputs[:, 0].tolist()]
