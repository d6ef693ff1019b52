"""What is done to each image before it goes into a batch."""

from collections.abc import Callable
from typing import Any

from torchvision.transforms import v2  # type: ignore[import-untyped]

from motley.data.images import Images

Transform = Callable[[Any], Any]


def training_transform(images: Images, img_size: int, augment: bool) -> Transform:
    """Random crop and flip to uint8 [C, img_size, img_size], from torch's global generator."""
    if not (augment and images.augment):
        return evaluation_transform(images, img_size)
    steps: list[Transform] = [v2.ToImage()]
    if images.native_size is None:
        steps.append(v2.RandomResizedCrop(img_size, antialias=True))
    else:
        steps.append(v2.RandomCrop(images.native_size, padding=max(1, images.native_size // 8)))
        if images.native_size != img_size:
            steps.append(v2.Resize((img_size, img_size), antialias=True))
    return v2.Compose([*steps, v2.RandomHorizontalFlip()])  # type: ignore[no-any-return]


def evaluation_transform(images: Images, img_size: int) -> Transform:
    """Resize and crop the middle, to uint8 [C, img_size, img_size]."""
    if images.native_size == img_size:
        return v2.ToImage()  # type: ignore[no-any-return]
    if images.native_size is not None:
        return v2.Compose([v2.ToImage(), v2.Resize((img_size, img_size), antialias=True)])  # type: ignore[no-any-return]
    return v2.Compose(  # type: ignore[no-any-return]
        [v2.ToImage(), v2.Resize(round(img_size * 8 / 7), antialias=True), v2.CenterCrop(img_size)]
    )
