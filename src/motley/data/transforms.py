"""What is done to each image before it goes into a batch: torchvision's and timm's parts.

All draw from generators that are seeded for the sample: torch's by the loader, and here Python's
and NumPy's, from which timm's parts draw.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from timm.data.auto_augment import auto_augment_transform, posterize, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import v2  # type: ignore[import-untyped]

from motley.data.images import Images
from motley.errors import MotleyError

Transform = Callable[[Any], Any]


@dataclass(frozen=True)
class Look:
    """How a model wants its images, and what else is done to training images.

    Attributes:
        size: pixels a side. mean, std: of a channel, of pixels scaled to 0..1.
        interpolation: of a resize. crop: part of a held-out image's side that is seen.
        augment: random crops and flips, where images are still of their class then.
        auto: timm's RandAugment or AutoAugment, as in rand-m9-mstd0.5; empty: none.
        jitter: of brightness, contrast and saturation. erase: probability of a rectangle of noise.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    crop: float = 0.875
    augment: bool = True
    auto: str = ""
    jitter: float = 0.0
    erase: float = 0.0

    @property
    def _resize(self) -> dict[str, Any]:
        return {"interpolation": v2.InterpolationMode(self.interpolation), "antialias": True}

    def of_training(self, images: Images) -> Transform:
        """An image to uint8 [C, size, size]."""
        steps = [self._framing(images)]
        if self.auto:
            steps += [v2.ToPILImage(), self._auto_augment(), v2.ToImage()]
        if self.jitter:
            steps.append(v2.ColorJitter(*[self.jitter] * 3))
        if self.erase:
            steps.append(self._erase())
        whole = v2.Compose(steps)
        return seeded(whole) if self.auto or self.erase else whole

    def of_evaluation(self, images: Images) -> Transform:
        """The same of a held-out image: resized, and of it the middle."""
        square = (self.size, self.size)
        if images.native_size == self.size:
            return v2.ToImage()  # type: ignore[no-any-return]
        if images.native_size is not None:
            return v2.Compose([v2.ToImage(), v2.Resize(square, **self._resize)])  # type: ignore[no-any-return]
        larger = v2.Resize(round(self.size / self.crop), **self._resize)
        return v2.Compose([v2.ToImage(), larger, v2.CenterCrop(self.size)])  # type: ignore[no-any-return]

    def _framing(self, images: Images) -> Transform:
        if not (self.augment and images.augment):
            return self.of_evaluation(images)
        steps: list[Transform] = [v2.ToImage()]
        if images.native_size is None:
            steps.append(v2.RandomResizedCrop(self.size, **self._resize))
        else:
            steps.append(v2.RandomCrop(images.native_size, padding=max(1, images.native_size // 8)))
            if images.native_size != self.size:
                steps.append(v2.Resize((self.size, self.size), **self._resize))
        return v2.Compose([*steps, v2.RandomHorizontalFlip()])  # type: ignore[no-any-return]

    def _auto_augment(self) -> Transform:
        mean = tuple(min(255, round(255 * each)) for each in self.mean)
        known = {
            "translate_const": int(self.size * 0.45), "img_mean": mean if len(mean) > 1 else mean[0]
        }  # fmt: skip
        make = rand_augment_transform if self.auto.startswith("rand") else auto_augment_transform
        try:
            found: Any = make(self.auto, known)
        except (AssertionError, ValueError, KeyError) as error:
            raise MotleyError(
                f"--aa {self.auto}: timm has no such augmentation ({error}); take one as in "
                "rand-m9-mstd0.5, original or v0"
            ) from None
        for op in getattr(found, "ops", None) or chain.from_iterable(found.policy):
            if op.aug_fn is posterize:
                op.aug_fn = _posterize
        return found  # type: ignore[no-any-return]

    def _erase(self) -> Transform:
        erase = RandomErasing(self.erase, mode="pixel", device="cpu")  # type: ignore[no-untyped-call]
        mean, std = (255 * torch.tensor(each)[:, None, None] for each in (self.mean, self.std))

        def of(image: Tensor) -> Tensor:
            # timm's noise is of a normalised image.
            noised: Tensor = erase((image - mean) / std)
            return (noised * std + mean).round().clamp(0, 255).to(torch.uint8)

        return of


def _posterize(image: Any, bits: int, **known: Any) -> Any:
    """timm asks for 0 bits where it is to change most, which Pillow 12 refuses; before, all was
    black then."""
    return posterize(image, max(1, bits), **known)


def seeded(transform: Transform) -> Transform:
    """The same, drawing from Python's and NumPy's generators as torch's, which is seeded for the
    sample, has it."""

    def changed(image: Any) -> Any:
        with _seeded_by_torch():
            return transform(image)

    return changed


@contextmanager
def _seeded_by_torch() -> Iterator[None]:
    before, numpy_before = random.getstate(), np.random.get_state()
    seed = int(torch.randint(2**31, ()))
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
