"""The selection of the held-out samples with the largest loss in an evaluation."""

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from motley.data.source import Tensors
from motley.records.classes import JPEG, MOST_WORST, PNG
from motley.tasks.task import Task

_SIDE = 112  # most pixels of a picture's side
_SMALL = 48  # sides up to which a picture is kept exactly


class WorstSamples:
    """The samples with the largest loss on one rank.

    The device selects the samples of each batch. The samples are copied to the CPU once, at the
    end.

    Args:
        most: number of samples to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = min(most, MOST_WORST)
        self._rows: Tensors = {}

    @torch.no_grad()
    def add(
        self,
        indices: Sequence[int],
        scores: Tensors,
        pictures: Tensor | None,
        weights: Tensor | None = None,
    ) -> None:
        """Add the samples of a batch, and keep only those with the largest loss per weight.

        Args:
            indices: indices of the samples.
            scores: scores by name. Scores that are not tensors with a row for each sample are
                ignored.
            pictures: pictures of the samples, uint8 [n, channels, height, width], or None.
            weights: weight of each sample, [n], such as its number of tokens; None: 1 each.
        """
        if not self._most or not indices:
            return
        count = len(indices)
        device = scores["loss"].device
        new = {
            f"score.{name}": value.detach() for name, value in scores.items()
            if isinstance(value, Tensor) and value.dim() and len(value) == count
        }  # fmt: skip
        if weights is not None:
            new["score.loss"] = new["score.loss"] / weights.to(device).clamp(min=1e-9)
        new["index"] = torch.tensor(indices, device=device)
        if pictures is not None:
            new["picture"] = pictures
        rows = _select_worst(new, self._most)  # before two batches of pictures are joined
        if self._rows:
            both = {name: torch.cat([self._rows[name], value]) for name, value in rows.items()}
            rows = _select_worst(both, self._most)
        self._rows = rows

    def describe(self, task: Task) -> list[dict[str, Any]]:
        """Return a record of each kept sample, in the form that motley.records.classes writes."""
        rows = {name: value.cpu() for name, value in self._rows.items()}
        source, result = task.data(held_out=True), list[dict[str, Any]]()
        for at, index in enumerate(rows["index"].tolist() if rows else ()):
            scores = {
                name.removeprefix("score."): value[at]
                for name, value in rows.items() if name.startswith("score.")
            }  # fmt: skip
            loss = float(scores["loss"])
            record = {
                "index": index, "name": task.name_of(source, index),
                "loss": loss if math.isfinite(loss) else None, **task.describe_scores(scores),
            }  # fmt: skip
            if "picture" in rows:
                record |= _encode(rows["picture"][at])
            result.append(record)
        return result


def _select_worst(rows: Tensors, most: int) -> Tensors:
    """Return the rows with the largest loss. Among rows of equal loss, return the first ones."""
    order = rows["score.loss"].float().argsort(descending=True, stable=True)[:most]
    return {name: value[order.to(value.device)] for name, value in rows.items()}


def merge(parts: Sequence[Sequence[dict[str, Any]]], most: int) -> list[dict[str, Any]]:
    """Return the records of the samples with the largest loss on any rank, the largest first.

    A loss that is not finite counts as the largest.

    Args:
        parts: the records of each rank.
        most: number of records to return.
    """
    every = [record for part in parts for record in part]
    every.sort(key=lambda each: (-(math.inf if each["loss"] is None else each["loss"]),
                                 each["index"]))  # fmt: skip
    return every[: min(most, MOST_WORST)]


def _encode(pixels: Tensor) -> dict[str, str]:
    """Return the entries of a sample's record for a picture: a thumbnail in base64, and its format.

    Args:
        pixels: the image, uint8 [channels, height, width].
    """
    array = pixels.permute(1, 2, 0) if pixels.shape[0] == 3 else pixels[0]
    image, buffer = Image.fromarray(array.numpy()), io.BytesIO()
    is_small = max(image.size) <= _SMALL
    image.thumbnail((_SIDE, _SIDE))
    image.save(buffer, "PNG" if is_small else "JPEG", quality=85)
    kind = PNG if is_small else JPEG
    return {"picture": base64.b64encode(buffer.getvalue()).decode(), "picture_type": kind}
