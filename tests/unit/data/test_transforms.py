"""What is done to an image: torchvision's pixels bit by bit, and small images by the batch."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.loss import JsdCrossEntropy
from torch import Tensor
from torch.nn import functional
from torchvision import transforms
from torchvision.transforms import v2

from motley.data.images import Images, InMemory
from motley.data.source import first_batch
from motley.data.transforms import Look
from motley.data.transforms import seeded as by_torch
from motley.errors import MotleyError
from motley.tasks.builtin.image import ImageTask, crops
from motley.tasks.classifiers import Classifier

LOOK = Look(40, (0.5,) * 3, (0.5,) * 3)


def noise(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def images_of(native: int | None, channels: int = 3) -> Images:
    side = native or 64
    source = InMemory(noise(4, channels, side, side), torch.arange(4))
    return Images(source, source, 4, channels, None, None, native)


def drawn_with(seed: int, change: Callable[[object], Tensor], image: object) -> Tensor:
    torch.default_generator.manual_seed(seed)
    found = change(image)
    drawn = torch.rand(2)  # as many random numbers were used
    return torch.cat([found.flatten().float(), drawn])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("mode", "size"), [("RGB", (75, 50)), ("RGB", (50, 160)), ("L", (60, 60)), ("RGB", (40, 40))]
)
def test_a_random_crop_and_flip_is_torchvisions_bit_by_bit(
    interpolation: str, mode: str, size: tuple[int, int]
) -> None:
    look = replace(LOOK, interpolation=interpolation)
    kind = v2.InterpolationMode(interpolation)
    usual = v2.Compose([
        v2.ToImage(), v2.RandomResizedCrop(40, interpolation=kind, antialias=True),
        v2.RandomHorizontalFlip(),
    ])  # fmt: skip
    ours = look.for_training(images_of(None))
    pixels = noise(size[1], size[0], len(mode))
    picture = Image.fromarray(pixels.numpy() if mode == "RGB" else pixels[..., 0].numpy())
    for seed in range(200):
        expected = drawn_with(seed, usual, picture)
        assert torch.equal(drawn_with(seed, ours, picture), expected)
        for tensor in (pixels.permute(2, 0, 1), pixels.permute(2, 0, 1).contiguous()):
            assert torch.equal(drawn_with(seed, ours, tensor), expected)


@pytest.mark.parametrize("native", [40, 64])
def test_a_shift_and_flip_is_torchvisions_bit_by_bit(native: int) -> None:
    usual = v2.Compose([
        v2.ToImage(), v2.RandomCrop(native, padding=native // 8),
        *([] if native == 40 else [v2.Resize((40, 40), antialias=True)]), v2.RandomHorizontalFlip(),
    ])  # fmt: skip
    ours, pixels = LOOK.for_training(images_of(native)), noise(native, native, 3)
    for seed in range(200):
        expected = drawn_with(seed, usual, pixels.permute(2, 0, 1))
        for image in (pixels.permute(2, 0, 1), Image.fromarray(pixels.numpy())):
            assert torch.equal(drawn_with(seed, ours, image), expected)


def test_held_out_images_are_timms_bit_by_bit_for_every_model() -> None:
    configs = [Classifier(name).data_config() for name in timm.list_models()]
    seen = {(found["interpolation"], found["crop_pct"], found["crop_mode"]) for found in configs}
    assert len(seen) > 40 and {mode for _, _, mode in seen} == {"center", "squash", "border"}
    mean, std = (0.3, 0.5, 0.6), (0.2, 0.3, 0.4)
    normalize = transforms.Normalize(torch.tensor(mean), torch.tensor(std))
    for interpolation, crop, mode in sorted(seen):
        look = Look(50, mean, std, interpolation, crop, crop_mode=mode)
        ours = look.for_evaluation(images_of(None))
        usual = timm.data.create_transform((3, 50, 50), interpolation=interpolation, mean=mean,
                                           std=std, crop_pct=crop, crop_mode=mode)  # fmt: skip
        for height, width in ((75, 53), (52, 160), (40, 44)):
            pixels = noise(height, width, 3)
            picture = Image.fromarray(pixels.numpy())
            for image in (picture, pixels.permute(2, 0, 1)):
                assert torch.equal(normalize(ours(image).float() / 255), usual(picture))


def test_so_it_is_where_other_changes_follow() -> None:
    look = replace(LOOK, auto="rand-m9-mstd0.5", jitter=0.4, erase=0.5)
    ours = look.for_training(images_of(None))
    steps = [v2.ToPILImage(), look._auto_augment(), v2.ToImage(), v2.ColorJitter(0.4, 0.4, 0.4)]
    crop = v2.RandomResizedCrop(40, antialias=True)
    whole = [v2.ToImage(), crop, v2.RandomHorizontalFlip(), *steps, look._erase()]
    usual = by_torch(v2.Compose(whole))
    picture = Image.fromarray(noise(50, 75, 3).numpy())
    for seed in range(40):
        assert torch.equal(drawn_with(seed, ours, picture), drawn_with(seed, usual, picture))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_small_images_are_enlarged_by_the_batch_as_torchvision_does_of_floats(
    interpolation: str,
) -> None:
    look = replace(LOOK, interpolation=interpolation)
    resize = v2.Resize((40, 40), interpolation=v2.InterpolationMode(interpolation), antialias=True)
    small = noise(5, 3, 8, 8)
    found = look.enlarged(small.float())
    assert found.dtype == torch.float32
    assert torch.equal(found, resize(small.float()).clamp(0, 255))
    for row, image in enumerate(small):  # of a sample, whoever else is in its batch
        assert torch.equal(look.enlarged(image[None].float())[0], found[row])
    # Uint8 is rounded twice, behind the rows and behind the columns: by half a level each time.
    # What overshoots is cut off twice too, so these are not of the whole range.
    soft = small // 2 + 64
    rounded = (look.enlarged(soft.float()) - resize(soft).float()).abs()
    assert rounded.max() <= 1.1 and rounded.mean() <= 0.4


@pytest.mark.parametrize(
    ("native", "changes", "side"),
    [(8, {}, 8), (40, {}, 40), (64, {}, 40), (8, {"auto": "rand-m9-mstd0.5"}, 40),
     (8, {"jitter": 0.4}, 40), (8, {"erase": 0.5}, 40), (8, {"boxes": True}, 40)],
)  # fmt: skip
@pytest.mark.parametrize("augment", [True, False])
def test_only_small_images_travel_small_and_not_where_they_are_changed_large(
    native: int, changes: dict[str, object], side: int, augment: bool
) -> None:
    look, images = replace(LOOK, augment=augment, **changes), images_of(native)
    image = Image.fromarray(np.ascontiguousarray(images.train[0][0].permute(1, 2, 0)))
    train, test = look.for_training(images)(image), look.for_evaluation(images)(image)
    assert train.shape == (3, side, side) and train.dtype == torch.uint8
    assert test.shape[1] == min(native, look.size), "a held-out image is never changed large"


def test_a_small_image_is_what_it_was_at_full_size() -> None:
    images = images_of(8)
    steps = [v2.ToImage(), v2.RandomCrop(8, padding=1), v2.Resize((40, 40), antialias=True)]
    before = v2.Compose([*steps, v2.RandomHorizontalFlip()])
    ours = LOOK.for_training(images)
    for seed in range(50):
        torch.manual_seed(seed)
        expected = before(images.train[seed % 4][0])
        torch.manual_seed(seed)
        found = LOOK.enlarged(ours(images.train[seed % 4][0])[None].float())[0]
        rounded = (found - expected.float()).abs()
        assert rounded.max() <= 1 and rounded.mean() <= 0.4


def test_batches_and_what_a_device_is_timed_with_are_small_and_the_net_sees_them_large() -> None:
    task = ImageTask(img_size=32)
    batch = first_batch(task, 3)[0].data
    assert batch["images"].shape == (3, 1, 8, 8)
    assert task.noise(batch, 5)["images"].shape == (5, 1, 8, 8)
    seen: list[Tensor] = []

    def net(pixels: Tensor) -> Tensor:
        seen.append(pixels)
        return torch.zeros(len(pixels), 10)

    task.scores(net, batch)
    task.losses(net, task.noise(batch, 5))
    assert [pixels.shape for pixels in seen] == [(3, 1, 32, 32), (5, 1, 32, 32)]
    assert first_batch(ImageTask(img_size=32, cutmix=1.0), 4)[0].data["images"].shape[-1] == 32


@pytest.mark.parametrize("count", [5, 10])
def test_several_crops_are_torchvisions_and_their_logits_are_averaged(count: int) -> None:
    task = ImageTask(test_crops=count, img_size=8)
    image, label = task.images.test[3]
    cut = task.sample((image, label), training=False)["images"]
    assert cut.shape == (count, 1, 8, 8)
    large = v2.functional.resize(v2.functional.to_pil_image(image), [9], antialias=True)
    due = (v2.FiveCrop(8) if count == 5 else v2.TenCrop(8))(large)
    assert all(
        torch.equal(own, v2.functional.pil_to_tensor(each))
        for own, each in zip(cut, due, strict=True)
    )
    batch = task.collate([task.sample(task.images.test[n], training=False) for n in range(3)])
    net = task.model().eval()
    with torch.no_grad():
        own = task.logits(net, batch["images"])
        apart = torch.stack([task.logits(net, each) for each in batch["images"]]).mean(dim=1)
    torch.testing.assert_close(own, apart)
    pictures = task.pictures(batch)
    assert pictures is not None and torch.equal(pictures, batch["images"][:, 4])


def test_a_number_of_crops_that_torchvision_lacks_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="7 is not a possible number of crops"):
        crops("7")


def test_crops_and_flips_of_other_sizes_are_torchvisions() -> None:
    look = replace(LOOK, scale=(0.5, 0.9), ratio=(1.0, 2.0), mirror=0.0)
    image = Image.fromarray(np.arange(64 * 80 * 3, dtype=np.uint8).reshape(64, 80, 3))
    own = look.for_training(images_of(None))
    due = v2.RandomResizedCrop(40, scale=(0.5, 0.9), ratio=(1.0, 2.0), antialias=True)
    for seed in range(5):
        torch.default_generator.manual_seed(seed)
        found = own(image)
        torch.default_generator.manual_seed(seed)
        assert torch.equal(found, due(v2.functional.pil_to_tensor(image)))
    plain = replace(LOOK, scale=(1.0, 1.0), ratio=(1.25, 1.25))
    still, turned, mirrored = (
        replace(plain, mirror=mirror, turn=turn).for_training(images_of(None))(image)
        for mirror, turn in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0))
    )
    assert torch.equal(turned, still.flip(-2)) and torch.equal(mirrored, still.flip(-1))
    assert not torch.equal(turned, still)
    small = replace(LOOK, size=32, mirror=1.0).for_training(images_of(32))
    with pytest.raises(
        MotleyError, match="--scale, --ratio and --vflip apply to images of several"
    ):
        replace(LOOK, size=32, turn=0.5).for_training(images_of(32))
    drawn = [small.draw()[2] for _ in range(9)]  # type: ignore[attr-defined]
    assert all(drawn)


def test_erased_rectangles_have_the_content_and_number_that_are_asked_for() -> None:
    white = InMemory(torch.full((4, 3, 64, 64), 255, dtype=torch.uint8), torch.arange(4))
    images = Images(white, white, 4, 3, None, None, 64)
    parts = []
    for mode, count in (("const", 1), ("const", 9), ("pixel", 1)):
        look = replace(LOOK, size=64, erase=1.0, augment=False, erase_mode=mode, erase_count=count)
        erase = look.for_training(images)
        found = []
        for seed in range(12):
            torch.default_generator.manual_seed(seed)
            found.append(erase(white.images[0]))
        if mode == "const":  # the mean of normalised pixels
            assert {*torch.stack(found).unique().tolist()} == {128, 255}
        else:
            assert len(torch.stack(found).unique()) > 50
        parts.append([is_rectangle((each != 255).any(dim=0)) for each in found])
    assert all(parts[0]) and not all(parts[1])


def test_a_sample_of_several_images_begins_with_the_plain_one() -> None:
    task = ImageTask(
        img_size=16, aug_splits=3, aa="augmix-m5-w4-d2", reprob=1.0, resplit=True, hflip=0.0
    )
    item = task.images.train[0]
    images = task.sample(item, training=True)["images"]
    assert images.shape == (3, 1, 16, 16)
    plain = replace(task.look, copies=1, auto="", erase=0.0, boxes=True).for_training(task.images)
    torch.manual_seed(5)
    images = task.sample(item, training=True)["images"]
    torch.manual_seed(5)
    torch.randint(2**31, ())  # seeds Python and NumPy
    assert torch.equal(images[0], plain(item[0]))
    assert len({image.numpy().tobytes() for image in images}) == 3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_several_images_is_timms(smoothing: float) -> None:
    options = {"aug_splits": 3, "aa": "augmix-m5-w4-d2", "smoothing": smoothing, "img_size": 8}
    task = ImageTask(jsd_loss=True, **options)  # type: ignore[arg-type]
    batch = task.collate([task.sample(task.images.train[n], training=True) for n in range(5)])
    assert batch["images"].shape == (5, 3, 1, 8, 8)
    net = task.model().eval()
    with torch.no_grad():
        outputs = torch.cat([task.logits(net, batch["images"][:, copy]) for copy in range(3)])
        labels = batch["labels"].repeat(3)
        due = JsdCrossEntropy(num_splits=3, smoothing=smoothing)(outputs, labels)
        torch.testing.assert_close(task.losses(net, batch).mean(), due)
        mean = ImageTask(**options).losses(net, batch).mean()  # type: ignore[arg-type]
        usual = functional.cross_entropy(outputs, labels, label_smoothing=smoothing)
    torch.testing.assert_close(mean, usual)


def is_rectangle(mask: Tensor) -> bool:
    """Return True if all pixels of a mask are one rectangle."""
    rows, columns = mask.any(dim=1), mask.any(dim=0)
    return int(mask.sum()) == int(rows.sum()) * int(columns.sum())


@pytest.mark.parametrize(("options", "says"), [
    ({"scale": (0.9, 0.1)}, "--scale 0.9 0.1: give two numbers above 0, the smaller one first"),
    ({"ratio": (1.0,)}, "--ratio 1: give two numbers above 0"),
    ({"bce_target_thresh": 0.2}, "--bce-target-thresh has no effect without --bce-loss"),
    ({"bce_loss": True, "target": "value", "labels": "x.csv"}, "--bce-loss is a loss for classes"),
    ({"jsd_loss": True}, "--jsd-loss needs several images of each sample; add --aug-splits 3"),
    ({"aug_splits": 3}, "all images of a sample would be equal; add --aa augmix-m5-w4-d2"),
    ({"aug_splits": 3, "aa": "v0", "mixup": 0.2}, "--aug-splits does not go with --mixup"),
    ({"aug_splits": 3, "aa": "v0", "jsd_loss": True, "bce_loss": True}, "and --bce-loss changes"),
])  # fmt: skip
def test_options_of_images_that_do_not_fit_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        task = ImageTask(**options)
        task.check_options()
        _ = task.look


def test_options_of_a_held_out_image_change_it() -> None:
    usual, cut = ImageTask(img_size=8).look, ImageTask(img_size=8, crop_pct=0.5).look
    assert (usual.crop, cut.crop) == (1.0, 0.5)
    assert ImageTask(img_size=8, interpolation="nearest").look.interpolation == "nearest"
