"""Changes to images before and after they are put into a batch.

Transforms of torchvision and timm change single images. Mixup and CutMix combine neighbours in the
global order. Images that lie on the GPU are shifted and mirrored by the GPU.

All transforms draw from generators that are seeded for the sample. The loader seeds torch's
generator. This module seeds the generators of Python and NumPy, which timm's transforms use.
Samples 2k and 2k + 1 of a global batch are mixed with each other, by numbers drawn for the first
sample. Each image is therefore decoded once, both images of a pair are in one micro-batch, and the
result does not depend on the ranks.

Sources: Zhang et al., "mixup", 2018; Yun et al., "CutMix", 2019; timm.data.mixup for the choice
between mixup and CutMix.

A rank that shares one core with other ranks cannot read as fast as its GPU computes. If images in
memory are only shifted and mirrored, the GPU can do this work instead. The host draws three numbers
per image, and the GPU copies the pixels. The pixels are equal to those from the host, bit by bit.
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
_FIVE = 5  # crops: four corners and the middle
_AUGMIX_SHIFT = 0.3  # largest shift in AugMix, as a part of the size; as in timm
_ROOM = 0.875  # most of a side that a crop of several takes


@dataclass(frozen=True)
class Look:
    """The preparation of images for a model, and the augmentation of training images.

    Attributes:
        size: side of the images in pixels.
        mean: mean of each channel, of pixels scaled to 0..1.
        std: standard deviation of each channel, of pixels scaled to 0..1.
        interpolation: interpolation for resizing.
        crop: fraction of a held-out image's side that is used.
        crop_mode: timm's way to make an image square: center, border or squash.
        augment: True: apply random crops and flips, if these keep the class of the images.
        auto: timm's RandAugment, AutoAugment or AugMix, such as rand-m9-mstd0.5; empty: none.
        jitter: strength of random changes in brightness, contrast and saturation.
        erase: probability that a rectangle is replaced by noise.
        boxes: True if pairs of training images exchange boxes, as in CutMix.
        scale: smallest and largest fraction of a training image's area that a random crop takes.
        ratio: smallest and largest ratio of a random crop's width to its height.
        mirror: probability that a training image is mirrored.
        turn: probability that a training image is flipped upside down.
        erase_mode: timm's name of the content of erased rectangles: pixel, const or rand.
        erase_count: largest number of rectangles that are erased in an image.
        copies: number of images that a training sample has in a batch. The first image is only
            cropped and flipped, and the others are also changed by ``auto`` and ``jitter``.
        erase_first: True if ``erase`` applies to the first of several images, too.
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
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    mirror: float = 0.5
    turn: float = 0.0
    erase_mode: str = "pixel"
    erase_count: int = 1
    copies: int = 1
    erase_first: bool = True

    @property
    def _resize(self) -> dict[str, Any]:
        return {"interpolation": v2.InterpolationMode(self.interpolation), "antialias": True}

    @property
    def _changes_enlarged(self) -> bool:
        """True if images are enlarged to the model's size before they are augmented."""
        return bool(self.auto or self.jitter or self.erase or self.boxes)

    def for_training(self, images: Images) -> Transform:
        """Return the transform from an image to uint8 [C, H, W], for training.

        The result has ``size`` pixels per side, or fewer if all images have fewer. In that case
        :meth:`enlarged` enlarges the images later. With several ``copies`` of an image the result
        is uint8 [copies, C, H, W].
        """
        frame, changes, erase = self._framing(images), list[Transform](), list[Transform]()
        if self.auto:
            changes += [v2.ToPILImage(), self._auto_augment(), v2.ToImage()]
        if self.jitter:
            changes.append(v2.ColorJitter(*[self.jitter] * 3))
        if self.erase:
            erase.append(self._erase())
        if self.copies > 1:
            whole = self._copy(frame, changes, erase)
        else:
            whole = v2.Compose([frame, *changes, *erase]) if changes or erase else frame
        return seeded(whole) if self.auto or self.erase else whole

    def _copy(
        self, frame: Transform, changes: Sequence[Transform], erase: Sequence[Transform]
    ) -> Transform:
        """Return the transform of one image to several images, as timm's AugMixDataset does.

        Args:
            frame: the crop and flip, which all images of a sample share.
            changes: changes of colours and shapes, which the first image does not get.
            erase: the transform that erases rectangles; empty: nothing is erased.
        """

        def changed(image: Any) -> Tensor:
            framed = frame(image)
            return torch.stack([
                _apply([*(changes if copy else ()), *(erase if copy or self.erase_first else ())],
                       framed)
                for copy in range(self.copies)
            ])  # fmt: skip

        return changed

    def for_evaluation(self, images: Images) -> Transform:
        """Return the transform of a held-out image, with the same result as timm's, bit by bit.

        Small images of a known size are only converted to tensors.
        """
        if images.native_size is not None and images.native_size <= self.size:
            return v2.ToImage()  # type: ignore[no-any-return]
        usual = timm.data.create_transform(
            (len(self.mean), self.size, self.size), interpolation=self.interpolation,
            mean=self.mean, std=self.std, crop_pct=self.crop, crop_mode=self.crop_mode,
            normalize=False,
        )  # fmt: skip

        def changed(image: Any) -> Tensor:
            # The results of PIL and torch differ by one level in some pixels.
            pixels: Tensor = usual(
                v2.functional.to_pil_image(image) if isinstance(image, Tensor) else image
            )
            return pixels

        return changed

    def for_crops(self, count: int) -> Transform:
        """Return the transform of a held-out image to several crops, uint8 [count, C, size, size].

        The shorter side is resized as for one crop. If a single crop would take the whole side, the
        side is resized to 1 / 0.875 of the crop's side instead. The crops are torchvision's: four
        corners and the middle, and with 10 crops also the mirror images of these five.

        Args:
            count: 5 or 10.
        """
        side = round(self.size / min(self.crop, _ROOM))
        cut = v2.FiveCrop(self.size) if count == _FIVE else v2.TenCrop(self.size)

        def changed(image: Any) -> Tensor:
            whole = v2.functional.to_pil_image(image) if isinstance(image, Tensor) else image
            whole = v2.functional.resize(whole, [side], **self._resize)
            return torch.stack([v2.functional.pil_to_tensor(part) for part in cut(whole)])

        return changed

    def enlarged(self, pixels: Tensor) -> Tensor:
        """Return a batch in the model's size, [n, C, size, size].

        Enlarged pixels are floats, and are not rounded. Results of different devices differ in the
        last bit. Rounding to whole numbers could enlarge this difference to 1. Values outside of
        the range of uint8, which a cubic filter can produce, are clipped to this range.

        Args:
            pixels: 0 to 255, [n, C, H, W], on any device.
        """
        if pixels.shape[-1] == self.size:
            return pixels
        square = [self.size, self.size]
        large: Tensor = v2.functional.resize_image(pixels.float(), square, **self._resize)
        return large.clamp_(0, 255)

    def _fit(self, native: int, whole: bool = False) -> list[Transform]:
        """Return the transforms from images of a known size to the model's size.

        By default the device enlarges small images later. If the host enlarged an image from 32 to
        224 pixels per side, the number of bytes to transfer would be 50 times as large.

        Args:
            native: pixels per side of the images.
            whole: True: the transforms also enlarge small images.
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
        parts = (self.scale, self.ratio, self.turn)
        if self.augment and parts != (Look.scale, Look.ratio, Look.turn):
            raise MotleyError(
                "--scale, --ratio and --vflip apply to images of several sizes, and all of these "
                f"have {native} pixels a side and are only shifted and mirrored; leave the "
                "options out"
            )
        if self.augment and images.augment:
            return ShiftAndFlip(native, fit, self.mirror)
        return v2.Compose([v2.ToImage(), *fit])  # type: ignore[no-any-return]

    def _auto_augment(self) -> Transform:
        mean = tuple(min(255, round(255 * each)) for each in self.mean)
        known: dict[str, Any] = {
            "translate_const": int(self.size * 0.45), "img_mean": mean if len(mean) > 1 else mean[0]
        }  # fmt: skip
        make = auto_augment.auto_augment_transform
        if self.auto.startswith("rand"):
            make = auto_augment.rand_augment_transform
        elif self.auto.startswith("augmix"):
            make = auto_augment.augment_and_mix_transform
            known["translate_pct"] = _AUGMIX_SHIFT
        try:
            result: Any = make(self.auto, known)
        except (AssertionError, ValueError, KeyError) as error:
            raise MotleyError(
                f"--aa {self.auto}: timm does not know this augmentation ({error}); use one such "
                "as rand-m9-mstd0.5, augmix-m5-w4-d2, original or v0"
            ) from None
        for op in getattr(result, "ops", None) or chain.from_iterable(result.policy):
            if op.aug_fn is auto_augment.posterize:
                op.aug_fn = _posterize
        return result  # type: ignore[no-any-return]

    def _erase(self) -> Transform:
        erase = RandomErasing(
            self.erase, mode=self.erase_mode, max_count=self.erase_count, device="cpu"
        )  # type: ignore[no-untyped-call]
        mean, std = (255 * torch.tensor(each)[:, None, None] for each in (self.mean, self.std))

        def erase_image(image: Tensor) -> Tensor:
            # timm adds noise to a normalised image.
            noised: Tensor = erase((image - mean) / std)
            return (noised * std + mean).round().clamp(0, 255).to(torch.uint8)

        return erase_image


class ShiftAndFlip:
    """A transform that equals torchvision's RandomCrop with padding and RandomHorizontalFlip.

    The transform takes half the time of torchvision's two transforms.

    The random numbers are equal to torchvision's, and so are the pixels, bit by bit.

    Args:
        size: pixels per side.
        between: transforms between shift and flip, which draw no random numbers.
        mirror: probability that an image is mirrored.
    """

    def __init__(self, size: int, between: Sequence[Transform], mirror: float = 0.5) -> None:
        self.padding, self.between, self._mirror = max(1, size // 8), between, mirror

    def draw(self) -> tuple[int, int, bool]:
        """Draw a random shift and mirroring of an image from torch's generator.

        Returns:
            The numbers of pixels by which the image is shifted down and to the right, and True if
            the image is mirrored afterwards.
        """
        down, right = (
            self.padding - int(torch.randint(2 * self.padding + 1, ())) for _ in range(2)
        )
        return down, right, float(torch.rand(1)) < self._mirror

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        """Return a randomly shifted and mirrored image, uint8 [C, size, size].

        Args:
            image: uint8 tensor [C, size, size], or an image of PIL.
        """
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
    """Return the target slice and the source slice that copy a row of pixels with a shift.

    Args:
        shift: number of pixels by which the row is shifted.
        size: number of pixels in the row.
    """
    return (
        slice(max(0, shift), size + min(0, shift)),
        slice(max(0, -shift), size - max(0, shift)),
    )


class RandomCropAndFlip:
    """A transform that equals torchvision's RandomResizedCrop and RandomHorizontalFlip.

    The transform takes half the time of torchvision's two transforms.

    The random numbers are equal to torchvision's, and so are the pixels, bit by bit.

    Only the crop is copied, into channels-last order, which torch's fastest resize kernel needs.
    The type of an image is checked once, and not in each operation.
    """

    def __init__(self, look: Look) -> None:
        self._size, self._resize = [look.size, look.size], look._resize
        self._usual = v2.RandomResizedCrop(look.size, scale=look.scale, ratio=look.ratio)
        self._mirror, self._turn = look.mirror, look.turn
        # Rounded to fp32, as in torchvision.
        self._log_ratio = torch.log(torch.tensor(self._usual.ratio)).tolist()

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        """Return a random crop, resized and randomly mirrored, uint8 [C, size, size].

        Args:
            image: uint8 tensor [C, H, W], or an image of PIL with one byte per channel.
        """
        top, left, height, width = self._box(image)
        mirrored = float(torch.empty(1).uniform_()) < self._mirror
        turned = self._turn > 0 and float(torch.empty(1).uniform_()) < self._turn
        if isinstance(image, Tensor):
            part = image[:, top : top + height, left : left + width].permute(1, 2, 0).contiguous()
        else:
            content = image.crop((left, top, left + width, top + height)).tobytes()
            part = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(height, width, -1)
        result: Tensor = v2.functional.resize_image(
            part.permute(2, 0, 1), self._size, **self._resize
        )
        result = result.flip(-2) if turned else result
        return result.flip(-1) if mirrored else result

    def _box(self, image: Image.Image | Tensor) -> tuple[int, int, int, int]:
        """Return top, left, height and width of a random crop of an image.

        If the first crop does not fit into the image, torchvision's own method repeats the draw
        and returns a crop.
        """
        height, width = image.shape[1:] if isinstance(image, Tensor) else image.size[::-1]
        before = torch.default_generator.get_state()
        area = height * width * torch.empty(1).uniform_(*self._usual.scale).item()
        ratio = torch.exp(torch.empty(1).uniform_(*self._log_ratio)).item()
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = (int(torch.randint(room + 1, ())) for room in (height - h, width - w))
            return top, left, h, w
        torch.default_generator.set_state(before)
        box = self._usual.make_params([image])
        return box["top"], box["left"], box["height"], box["width"]


def _apply(transforms: Sequence[Transform], image: Any) -> Any:
    """Apply all transforms to an image in order, and return the result."""
    for transform in transforms:
        image = transform(image)
    return image


def _posterize(image: Any, bits: int, **known: Any) -> Any:
    """Reduce an image to ``bits`` bits per channel, but at least to one bit.

    For the strongest change timm passes 0 bits, which Pillow 12 refuses. Earlier versions of Pillow
    returned a black image.
    """
    return auto_augment.posterize(image, max(1, bits), **known)  # type: ignore[no-untyped-call]


def seeded(transform: Transform) -> Transform:
    """Return a transform that first seeds Python's and NumPy's generators from torch's.

    The loader has seeded torch's generator for the sample.
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
    """The options of mixup and CutMix.

    Attributes:
        mixup: alpha of the Beta distribution of mixup's weights; 0: no mixup.
        cutmix: alpha of the Beta distribution of CutMix's weights; 0: no CutMix.
        probability: probability that a pair is mixed.
        switch: probability that CutMix mixes a pair, if both methods are in use.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5

    def draw(self) -> Tensor:
        """Draw the mixing of a sample and its neighbour from torch's generator.

        Returns:
            Four numbers, fp32 [4]: 1 for CutMix or 0 for mixup, the weight of the sample's own
                image, and the y and x coordinates of the box's centre, from 0 to 1.
        """
        chance, kind, y, x = torch.rand(4).tolist()
        if chance >= self.probability:
            return torch.tensor([0.0, 1.0, y, x])
        cuts = self.cutmix > 0 and (self.mixup <= 0 or kind < self.switch)
        alpha = self.cutmix if cuts else self.mixup
        weight = float(torch.distributions.Beta(alpha, alpha).sample())
        return torch.tensor([float(cuts), weight, y, x])


def pairs(n: int, grain: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of rows of a micro-batch that are mixed with each other.

    The last row of an odd number of rows has no partner, and is left out.

    Args:
        n: number of rows.
        grain: number of samples per interleaved group; see motley.data.source.
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
        grain: number of samples per interleaved group; see motley.data.source.

    Returns:
        The tensors ``images`` and ``labels``, ``partners``, the label of each image's partner, and
        ``own``, the weight of ``labels``, fp32 [n].
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
    """Exchange a box between two images, in place, and return the fraction of pixels that stay."""
    height, width = one.shape[-2:]
    side = math.sqrt(1 - weight)
    rows, columns = _span(y, side, height), _span(x, side, width)
    box = (slice(None), rows, columns)
    patch = one[box].clone()
    one[box] = other[box]
    other[box] = patch
    return 1 - patch[0].numel() / (height * width)


def _span(middle: float, side: float, length: int) -> slice:
    at, half = int(middle * length), int(length * side) / 2
    return slice(max(0, math.ceil(at - half)), min(length, math.ceil(at + half)))


_MOST = 2**28  # bytes of images on a GPU, including the margin for shifts


def resident(
    samples: Samples, source: Source, transform: Transform, device: torch.device
) -> "ResidentImages | None":
    """Return an object that reads these training images from the device's memory, or None.

    The result is None if the images do not fit into the device's memory, or if the transform does
    more than shift and flip.
    """
    if not isinstance(source, InMemory) or not isinstance(transform, ShiftAndFlip):
        return None
    count, channels, *sides = source.images.shape
    size = count * channels * math.prod(side + 2 * transform.padding for side in sides)
    if transform.between or size > _MOST:
        return None
    return ResidentImages(samples, source, transform, device)


class ResidentImages:
    """The samples of an image task whose training images lie in the memory of one GPU.

    Args:
        samples: the task, which reads the held-out samples.
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
        # With a margin of zeros, every shifted image is a part of its padded image.
        self._pool = functional.pad(source.images.to(device), [shift.padding] * 4)
        channels, height, width = source.images.shape[1:]
        self._channels, self._rows, self._columns = (
            torch.arange(count, device=device) for count in (channels, height, width)
        )
        if device.type == "cuda":  # batches are copied on another stream
            torch.cuda.synchronize(device)

    def data(self, held_out: bool) -> Source:
        """Return the source of the training samples or of the held-out samples.

        The item of a training sample is the pair of the image's index and its label.
        """
        return self._samples.data(held_out=True) if held_out else self._source.places

    def balanced_classes(self) -> Sequence[int] | None:
        """Return the class of each training sample if epochs are to be balanced, else None."""
        return self._samples.balanced_classes()

    def held_out_sets(self) -> Mapping[str, Source]:
        """Return additional held-out data sets by name."""
        return self._samples.held_out_sets()

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """Return the tensors of an item of the source.

        A training item has ``cut``: the image's index, the shifts down and to the right in pixels,
        and 1 if the image is mirrored, else 0.
        """
        if not training:
            return self._samples.sample(item, training)
        place, label = item
        return {"cut": (place, *self._shift.draw()), "labels": label}

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Tensors:
        """Return a batch of samples: tensors by name, with one row for each sample."""
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
        """Return the weight of each sample in the mean loss, [n]. None: all weights are equal."""
        return self._samples.weights(batch)

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """Return the relative compute time of training samples. None: all samples cost the same."""
        return self._samples.costs(indices)

    def name_of(self, source: Source, index: int) -> str:
        """Return the name of a sample for an error message."""
        return self._samples.name_of(source, index)

    def on(self, device: torch.device) -> Samples:
        """Return the object that reads samples for a rank with this device."""
        return self
