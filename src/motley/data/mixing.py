"""Mixup and CutMix of neighbours in the global order: the same whoever computes them.

Samples 2k and 2k + 1 of a global batch are mixed with one another, by numbers drawn for the first
of them; so each image is decoded once, and a pair is never cut apart.

Sources: Zhang et al., "mixup", 2018; Yun et al., "CutMix", 2019; timm.data.mixup for the choice
between them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixing:
    """How.

    Attributes:
        mixup, cutmix: alpha of the Beta distribution of the weights; 0: not done.
        probability: that a pair is mixed at all. switch: that it is by CutMix, where both are done.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5

    def __bool__(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def draw(self) -> Tensor:
        """For a sample and its neighbour, from torch's generator, fp32 [4]: whether it is CutMix,
        the weight of its own image, and the middle of a box, 0 to 1."""
        chance, kind, y, x = torch.rand(4).tolist()
        if chance >= self.probability:
            return torch.tensor([0.0, 1.0, y, x])
        cuts = self.cutmix > 0 and (self.mixup <= 0 or kind < self.switch)
        alpha = self.cutmix if cuts else self.mixup
        weight = float(torch.distributions.Beta(alpha, alpha).sample())
        return torch.tensor([float(cuts), weight, y, x])


def pairs(n: int, grain: int) -> Iterator[tuple[int, int]]:
    """Rows of a micro-batch that are mixed; one row may be left over, of a ragged batch.

    Args:
        n: rows. grain: of the groups that are interleaved; see motley.data.order.
    """
    groups = n // grain if n % grain == 0 else 1
    for group in range(groups):
        for first in range(0, n // groups - 1, 2):
            yield first * groups + group, (first + 1) * groups + group


def mix(images: Tensor, labels: Tensor, drawn: Tensor, grain: int) -> dict[str, Tensor]:
    """A batch whose pairs are mixed.

    Args:
        images: uint8 [n, C, H, W]; changed. labels: [n].
        drawn: of :meth:`Mixing.draw`, [n, 4].

    Returns:
        The images, both labels, and ``own``, the weight of the first of them, fp32 [n].
    """
    partners, own = labels.clone(), torch.ones(len(labels))
    for one, other in pairs(len(labels), grain):
        cuts, weight, y, x = drawn[one].tolist()
        if cuts:
            weight = _exchange_box(images[one], images[other], weight, y, x)
        elif weight < 1:
            first, second = images[one].float(), images[other].float()
            images[one] = (first.lerp(second, 1 - weight)).round_().to(torch.uint8)
            images[other] = (second.lerp(first, 1 - weight)).round_().to(torch.uint8)
        own[one] = own[other] = weight
        partners[one], partners[other] = labels[other], labels[one]
    return {"images": images, "labels": labels, "partners": partners, "own": own}


def _exchange_box(one: Tensor, other: Tensor, weight: float, y: float, x: float) -> float:
    """Exchange a box of two images, in place; the part of each that is left."""
    height, width = one.shape[-2:]
    side = math.sqrt(1 - weight)
    rows, columns = _span(y, side, height), _span(x, side, width)
    box = (slice(None), rows, columns)
    kept = one[box].clone()
    one[box] = other[box]
    other[box] = kept
    return 1 - kept[0].numel() / (height * width)


def _span(middle: float, side: float, length: int) -> slice:
    at, half = int(middle * length), int(length * side) / 2
    return slice(max(0, math.ceil(at - half)), min(length, math.ceil(at + half)))
