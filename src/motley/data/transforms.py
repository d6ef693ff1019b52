"""Changes to images before and after they are put into a batch.

Single images are changed by parts of torchvision and timm. Mixup and CutMix join neighbours in the
global order. Images that lie on the GPU are shifted and mirrored there.

All draw from generators that are seeded for the sample: torch's by the loader, and here Python's
and NumPy's, from which timm's parts draw. Samples 2k and 2k + 1 of a global batch are mixed with
one another, by numbers drawn for the first of them. Each image is therefore decoded once, a pair is
never cut apart, and the result is the same on any ranks.

Sources: Zhang et al., "mixup", 2018; Yun et al., "CutMix", 2019; timm.data.mixup for the choice
between them.

A rank that has one core, and shares it, cannot read as fast as its GPU computes. Images in memory
that are shifted and mirrored, and no more, do not need it to: the host draws three numbers for each
image, and the GPU copies the pixels. They equal the host's bit by bit.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torchvision.transforms import v2  # type: ignore[import-untyped]

from motley.data.images import Images, InMemory
from motley.data.import_timm import RandomErasing, auto_augment, timm
from motley.data.source import Samples, Source, Tensors
from motley.errors import MotleyError

Transform = Callable[[Any], Any]


@dataclass(frozen=True)
class Look:
    """How a model wants its images, and what else is done to training images.

    Attributes:
        size: pixels a side. mean, std: of a channel, of pixels scaled to 0..1.
        interpolation: of a resize. crop: part of a held-out image's side that is seen; crop_mode:
            timm's way to make it square: center, border or squash.
        augment: random crops and flips, where images are still of their class then.
        auto: timm's RandAugment or AutoAugment, as in rand-m9-mstd0.5; empty: none.
        jitter: of brightness, contrast and saturation. erase: probability of a rectangle of noise.
        boxes: training images will exchange boxes, as CutMix has them do.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    crop: float = 0.875
    crop_mode: str = "center"
    augment: bool = True
    auto: str = ""
    jitter: float = 0.0
    erase: float = 0.0
    boxes: bool = False

    @property
    def _resize(self) -> dict[str, Any]:
        return {"interpolation": v2.InterpolationMode(self.interpolation), "antialias": True}

    @property
    def _changes_enlarged(self) -> bool:
        """True if training images are changed at the model's size, and so are enlarged before."""
        return bool(self.auto or self.jitter or self.erase or self.boxes)

    def for_training(self, images: Images) -> Transform:
        """Return the transform from an image to uint8 [C, H, W], for training.

        The result has ``size`` pixels per side, or fewer if all images have so few.
        :meth:`enlarged` does the rest then.
        """
        steps = [self._framing(images)]
        if self.auto:
            steps += [v2.ToPILImage(), self._auto_augment(), v2.ToImage()]
        if self.jitter:
            steps.append(v2.ColorJitter(*[self.jitter] * 3))
        if self.erase:
            steps.append(self._erase())
        whole = steps[0] if len(steps) == 1 else v2.Compose(steps)
        return seeded(whole) if self.auto or self.erase else whole

    def for_evaluation(self, images: Images) -> Transform:
        """Return the transform of a held-out image: timm's own, bit by bit, unless it is small."""
        if images.native_size is not None and images.native_size <= self.size:
            return v2.ToImage()  # type: ignore[no-any-return]
        usual = timm.data.create_transform(
            (len(self.mean), self.size, self.size), interpolation=self.interpolation,
            mean=self.mean, std=self.std, crop_pct=self.crop, crop_mode=self.crop_mode,
            normalize=False,
        )  # fmt: skip

        def changed(image: Any) -> Tensor:
            # PIL and torch resize to pixels that differ by a level here and there.
            pixels: Tensor = usual(
                v2.functional.to_pil_image(image) if isinstance(image, Tensor) else image
            )
            return pixels

        return changed

    def enlarged(self, pixels: Tensor) -> Tensor:
        """Return a batch in the size of the model, [n, C, size, size]; float, if it was smaller.

        Pixels are not rounded: devices differ in the last bit, and rounding would make a level of
        it. Overshoot of a cubic filter is cut off, as for uint8.

        Args:
            pixels: 0 to 255, [n, C, H, W], on any device.
        """
        if pixels.shape[-1] == self.size:
            return pixels
        square = [self.size, self.size]
        large: Tensor = v2.functional.resize_image(pixels.float(), square, **self._resize)
        return large.clamp_(0, 255)

    def _fit(self, native: int, whole: bool = False) -> list[Transform]:
        """Return the transforms from images of a known size to the model's.

        Small ones are left to the device: enlarged from 32 to 224 pixels a side, they would be 50
        times the bytes on their way to it.

        Args:
            native: pixels per side of the images.
            whole: enlarge small images here nevertheless.
        """
        if native == self.size or (native < self.size and not whole):
            return []
        return [v2.Resize((self.size, self.size), **self._resize)]

    def _framing(self, images: Images) -> Transform:
        native, whole = images.native_size, self._changes_enlarged
        if native is None:
            crops = self.augment and images.augment
            return RandomCropAndFlip(self) if crops else self.for_evaluation(images)
        fit = self._fit(native, whole)
        if self.augment and images.augment:
            return ShiftAndFlip(native, fit)
        return v2.Compose([v2.ToImage(), *fit])  # type: ignore[no-any-return]

    def _auto_augment(self) -> Transform:
        mean = tuple(min(255, round(255 * each)) for each in self.mean)
        known = {
            "translate_const": int(self.size * 0.45), "img_mean": mean if len(mean) > 1 else mean[0]
        }  # fmt: skip
        make = auto_augment.auto_augment_transform
        if self.auto.startswith("rand"):
            make = auto_augment.rand_augment_transform
        try:
            result: Any = make(self.auto, known)
        except (AssertionError, ValueError, KeyError) as error:
            raise MotleyError(
                f"--aa {self.auto}: timm has no such augmentation ({error}); take one as in "
                "rand-m9-mstd0.5, original or v0"
            ) from None
        for op in getattr(result, "ops", None) or chain.from_iterable(result.policy):
            if op.aug_fn is auto_augment.posterize:
                op.aug_fn = _posterize
        return result  # type: ignore[no-any-return]

    def _erase(self) -> Transform:
        erase = RandomErasing(self.erase, mode="pixel", device="cpu")  # type: ignore[no-untyped-call]
        mean, std = (255 * torch.tensor(each)[:, None, None] for each in (self.mean, self.std))

        def erase_image(image: Tensor) -> Tensor:
            # timm's noise is of a normalised image.
            noised: Tensor = erase((image - mean) / std)
            return (noised * std + mean).round().clamp(0, 255).to(torch.uint8)

        return erase_image


class ShiftAndFlip:
    """torchvision's RandomCrop of a padded image and RandomHorizontalFlip, in half the time.

    The random numbers are equal to torchvision's, and so are the pixels, bit by bit.

    Args:
        size: pixels per side.
        between: transforms between the two, which draw no random numbers.
    """

    def __init__(self, size: int, between: Sequence[Transform]) -> None:
        self.padding, self.between = max(1, size // 8), between

    def draw(self) -> tuple[int, int, bool]:
        """Draw a random shift and mirroring of an image from torch's generator.

        Returns:
            The pixels by which the image is shifted down and to the right, and True if it is
            mirrored after that.
        """
        down, right = (
            self.padding - int(torch.randint(2 * self.padding + 1, ())) for _ in range(2)
        )
        return down, right, float(torch.rand(1)) < 0.5

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        """Uint8 [C, size, size], of uint8 [C, size, size] or of PIL's."""
        pixels = image if isinstance(image, Tensor) else v2.functional.pil_to_tensor(image)
        down, right, mirrored = self.draw()
        result = torch.zeros_like(pixels, memory_format=torch.contiguous_format)
        to_y, from_y = _overlap(down, pixels.shape[1])
        to_x, from_x = _overlap(right, pixels.shape[2])
        result[:, to_y, to_x] = pixels[:, from_y, from_x]
        for transform in self.between:
            result = transform(result)
        return result.flip(-1) if mirrored else result


def _overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Return where a shifted row of pixels lands, and which of its pixels do."""
    return (
        slice(max(0, shift), size + min(0, shift)),
        slice(max(0, -shift), size - max(0, shift)),
    )


class RandomCropAndFlip:
    """torchvision's RandomResizedCrop and RandomHorizontalFlip of one image, in half the time.

    The random numbers are equal to torchvision's, and so are the pixels, bit by bit.

    Only what is cropped is copied, pixel by pixel as the fastest of torch's kernels wants it; and
    no image is asked at every step what it is.
    """

    def __init__(self, look: Look) -> None:
        self._size, self._resize = [look.size, look.size], look._resize
        self._usual = v2.RandomResizedCrop(look.size)
        # Rounded to fp32, as in torchvision.
        self._log_ratio = torch.log(torch.tensor(self._usual.ratio)).tolist()

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        """Uint8 [C, size, size], of uint8 [C, H, W] or of PIL's whose colours are a byte each."""
        top, remaining, height, width = self._box(image)
        mirrored = float(torch.empty(1).uniform_()) < 0.5
        if isinstance(image, Tensor):
            part = (
                image[:, top : top + height, remaining : remaining + width]
                .permute(1, 2, 0)
                .contiguous()
            )
        else:
            content = image.crop((remaining, top, remaining + width, top + height)).tobytes()
            part = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(height, width, -1)
        result: Tensor = v2.functional.resize_image(
            part.permute(2, 0, 1), self._size, **self._resize
        )
        return result.flip(-1) if mirrored else result

    def _box(self, image: Image.Image | Tensor) -> tuple[int, int, int, int]:
        """Return top, left, height and width of a part.

        The method falls back on torchvision if the first part that it draws does not fit in.
        """
        height, width = image.shape[1:] if isinstance(image, Tensor) else image.size[::-1]
        before = torch.default_generator.get_state()
        area = height * width * torch.empty(1).uniform_(*self._usual.scale).item()
        ratio = torch.exp(torch.empty(1).uniform_(*self._log_ratio)).item()
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, remaining = (int(torch.randint(room + 1, ())) for room in (height - h, width - w))
            return top, remaining, h, w
        torch.default_generator.set_state(before)
        box = self._usual.make_params([image])
        return box["top"], box["left"], box["height"], box["width"]


def _posterize(image: Any, bits: int, **known: Any) -> Any:
    """Reduce an image to ``bits`` bits per colour, but to one at least.

    For the largest change timm passes 0 bits, which Pillow 12 refuses. Earlier versions made the
    image all black.
    """
    return auto_augment.posterize(image, max(1, bits), **known)  # type: ignore[no-untyped-call]


def seeded(transform: Transform) -> Transform:
    """Return the transform with Python's and NumPy's generators seeded from torch's.

    The loader seeds torch's generator for the sample.
    """

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

    def draw(self) -> Tensor:
        """Draw the mixing of a sample and its neighbour from torch's generator.

        Returns:
            Four numbers, fp32 [4]: 1 for CutMix and 0 for mixup, the weight of the sample's own
            image, and the middle of a box, 0 to 1.
        """
        chance, kind, y, x = torch.rand(4).tolist()
        if chance >= self.probability:
            return torch.tensor([0.0, 1.0, y, x])
        cuts = self.cutmix > 0 and (self.mixup <= 0 or kind < self.switch)
        alpha = self.cutmix if cuts else self.mixup
        weight = float(torch.distributions.Beta(alpha, alpha).sample())
        return torch.tensor([float(cuts), weight, y, x])


def pairs(n: int, grain: int) -> Iterator[tuple[int, int]]:
    """Yield the rows of a micro-batch that are mixed; a ragged batch may leave one row over.

    Args:
        n: number of rows.
        grain: rows per interleaved group; see motley.data.source.
    """
    groups = n // grain if n % grain == 0 else 1
    for group in range(groups):
        for first in range(0, n // groups - 1, 2):
            yield first * groups + group, (first + 1) * groups + group


def mix(images: Tensor, labels: Tensor, drawn: Tensor, grain: int) -> dict[str, Tensor]:
    """Return a batch whose pairs are mixed.

    Args:
        images: uint8 [n, C, H, W], changed in place.
        labels: label of each image, [n].
        drawn: numbers of :meth:`Mixing.draw` for each image, [n, 4].
        grain: rows per interleaved group; see motley.data.source.

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
    saved = one[box].clone()
    one[box] = other[box]
    other[box] = saved
    return 1 - saved[0].numel() / (height * width)


def _span(middle: float, side: float, length: int) -> slice:
    at, half = int(middle * length), int(length * side) / 2
    return slice(max(0, math.ceil(at - half)), min(length, math.ceil(at + half)))


_MOST = 2**28  # bytes of a GPU, with the margin that images are shifted into


def resident(
    samples: Samples, source: Source, transform: Transform, device: torch.device
) -> "ResidentImages | None":
    """Return the object that reads these training images from the device, or None.

    The device may be too small for the images, or unable to make their changes.
    """
    if not isinstance(source, InMemory) or not isinstance(transform, ShiftAndFlip):
        return None
    count, channels, *sides = source.images.shape
    size = count * channels * math.prod(side + 2 * transform.padding for side in sides)
    if transform.between or size > _MOST:
        return None
    return ResidentImages(samples, source, transform, device)


class ResidentImages:
    """The samples of an image task whose training images lie on one GPU; see Samples.

    Args:
        samples: the task; it reads the held-out samples.
        source: the training images.
        shift: the transform of training images.
        device: the GPU.
    """

    needs_workers = False

    def __init__(
        self, samples: Samples, source: InMemory, shift: ShiftAndFlip, device: torch.device
    ) -> None:
        self._samples, self._source, self._shift = samples, source, shift
        self.weight = samples.weight
        # With a margin of zeros, every shifted image is a part of its own.
        self._pool = functional.pad(source.images.to(device), [shift.padding] * 4)
        channels, height, width = source.images.shape[1:]
        self._channels, self._rows, self._columns = (
            torch.arange(count, device=device) for count in (channels, height, width)
        )
        if device.type == "cuda":  # a stream of their own copies batches
            torch.cuda.synchronize(device)

    def data(self, held_out: bool) -> Source:
        """See Samples; a training sample is the place of its image, and its label."""
        return self._samples.data(held_out=True) if held_out else self._source.places

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """See Samples; ``cut`` is place, shift down, shift to the right, and 1 if mirrored."""
        if not training:
            return self._samples.sample(item, training)
        place, label = item
        return {"cut": (place, *self._shift.draw()), "labels": label}

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Tensors:
        """See Samples."""
        if "cut" not in samples[0]:
            return self._samples.collate(samples)
        return {name: torch.tensor([each[name] for each in samples]) for name in samples[0]}

    def complete(self, batch: Tensors) -> Tensors:
        """Return a batch on the device with ``images``, uint8 [n, C, H, W]."""
        if "cut" not in batch:
            return self._samples.complete(batch)
        cut = batch["cut"][:, :, None]
        place, down, right, mirrored = cut.unbind(1)
        padding, last = self._shift.padding, len(self._columns) - 1
        rows = self._rows + padding - down
        columns = torch.where(mirrored > 0, last - self._columns, self._columns) + padding - right
        images: Tensor = self._pool[
            place[:, :, None, None], self._channels[:, None, None], rows[:, None, :, None],
            columns[:, None, None],
        ]  # fmt: skip
        return {"images": images, "labels": batch["labels"]}

    def weights(self, batch: Tensors) -> Tensor | None:
        """See Samples."""
        return self._samples.weights(batch)

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """See Samples."""
        return self._samples.costs(indices)

    def name_of(self, source: Source, index: int) -> str:
        """See Samples."""
        return self._samples.name_of(source, index)

    def on(self, device: torch.device) -> Samples:
        """See Samples."""
        return self
