"""Training images on the GPU: bit by bit those that the host makes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.data.images import Images, InMemory
from motley.data.loader import Loader
from motley.data.source import Key, Keyed, Samples
from motley.data.transforms import ResidentImages, ShiftAndFlip, resident
from motley.plan.plan import Plan
from motley.tasks.builtin.image import ImageTask

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def noise(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class OnCpu(ImageTask):
    """Keeps its images on the CPU as others do on a GPU."""

    def on(self, device: torch.device) -> Samples:
        found = resident(self, self.images.train, self._training, device)
        assert found is not None
        return found


def task_with(kind: type[ImageTask], source: Any, side: int, **options: Any) -> ImageTask:
    task = kind(name="vit_tiny_patch16_224", dataset="synthetic", img_size=side, **options)
    channels = source[0][0].shape[0]
    task.__dict__["images"] = Images(source, source, 10, channels, None, None, side)
    return task


@pytest.mark.parametrize(("channels", "side"), [(3, 32), (1, 16), (3, 40)])
def test_a_device_shifts_and_mirrors_as_the_host_does(channels: int, side: int) -> None:
    source = InMemory(noise(7, channels, side, side), torch.arange(7), length=20)
    task = task_with(OnCpu, source, side)
    there = task.on(CPU)
    keys = [Key(index % 20, 1000 + index) for index in range(64)]
    here = Keyed(task, training=True)
    wanted = here.batch(here.__getitems__(keys))
    other = Keyed(there, training=True)
    found = other.batch(other.__getitems__(keys))
    assert sum(each.nbytes for each in found.tensors()) < 3000  # what goes to the device
    completed = there.complete(found.data)
    assert completed.keys() == wanted.data.keys()
    for name, value in completed.items():
        assert value.dtype == wanted.data[name].dtype
        assert torch.equal(value, wanted.data[name])
    assert found.indices == wanted.indices


def test_a_loader_gives_the_same_batches_and_needs_no_processes() -> None:
    source = InMemory(noise(9, 3, 32, 32), torch.arange(9), length=24)
    plan = Plan(8, (3.0, 5.0), (2, 5), EXACT)
    config = Config(batch_size="8", seed=3, workers=None)
    passes = []
    for kind in (ImageTask, OnCpu):
        loader = Loader(task_with(kind, source, 32), config, 0, CPU)
        trained = [batch for _, batches in loader.steps(0, 0, plan) for batch, _ in batches]
        passes.append([*trained, *loader.test_batches(plan)])
    for wanted, found in zip(*passes, strict=True):
        assert wanted.indices == found.indices
        for name, value in wanted.data.items():
            assert torch.equal(value, found.data[name])


class Doubled(ImageTask):
    """Has samples of its own."""

    def sample(self, item: Any, training: bool) -> Any:
        return super().sample(item, training)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ImageTask, {"mixup": 0.2}),
        (ImageTask, {"aa": "rand-m9-mstd0.5"}),
        (ImageTask, {"color_jitter": 0.3}),
        (ImageTask, {"augment": False}),
        (Doubled, {}),
    ],
)
def test_what_a_device_cannot_do_alike_stays_on_the_host(
    kind: type[ImageTask], options: dict[str, Any]
) -> None:
    task = task_with(kind, InMemory(noise(4, 3, 32, 32), torch.arange(4)), 32, **options)
    assert task.on(GPU) is task


def test_images_that_are_too_many_or_read_from_files_stay_on_the_host() -> None:
    shift = ShiftAndFlip(32, [])
    task = task_with(ImageTask, InMemory(noise(4, 3, 32, 32), torch.arange(4)), 32)
    few = InMemory(torch.empty(1, 3, 32, 32, dtype=torch.uint8).expand(50_000, -1, -1, -1),
                   torch.zeros(50_000))  # fmt: skip
    many = InMemory(few.images[:1].expand(60_000, -1, -1, -1), torch.zeros(60_000))
    files = [(noise(3, 32, 32), 0)]
    meta = torch.device("meta")
    assert isinstance(resident(task, few, shift, meta), ResidentImages)
    assert resident(task, many, shift, meta) is None
    assert resident(task, files, shift, meta) is None
    assert resident(task, few, ShiftAndFlip(32, [torch.nn.Identity()]), meta) is None
