"""Where a gradient overflows is found: the layer and the samples."""

import pytest
import torch

from motley.data.source import Batch
from motley.tasks.builtin import get_task
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net
from motley.train.command_line import read_config, training_parser
from motley.train.scale_search import find_overflow


@pytest.fixture
def model() -> TaskModel:
    """The digits ViT in fp16."""
    config = read_config(training_parser(""), [])
    task = get_task(config)
    return TaskModel(task, build_net(task, config), "fp16", torch.device("cpu"))


def batches(model: TaskModel, *starts: int) -> list[Batch]:
    return [
        Batch(model.noise(4) | {"labels": torch.arange(4)}, tuple(range(start, start + 4)))
        for start in starts
    ]


def test_what_is_finite_is_nobodys_fault(model: TaskModel) -> None:
    assert find_overflow(model, batches(model, 0, 10), 2.0**8 / 8) is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_layer_and_the_samples_are_named(model: TaskModel) -> None:
    def burst(_module: object, _given: object, made: torch.Tensor) -> None:
        if made.requires_grad:
            made.register_hook(
                lambda g: g * torch.tensor([1, 1, torch.inf, 1]).view(4, 1, 1).half()
            )

    model.net.blocks[1].mlp.fc2.register_forward_hook(burst)
    found = find_overflow(model, batches(model, 0, 10)[1:], 1.0)
    assert found is not None and found.layer == "blocks.1.mlp.fc2"
    assert (found.values, found.samples) == ("gradient", (12,))
    assert str(found) == "the gradient of blocks.1.mlp.fc2 (sample indices 12)"


def test_too_high_a_scale_overflows_in_fp16(model: TaskModel) -> None:
    found = find_overflow(model, batches(model, 100, 200), 2.0**30)
    assert found is not None and found.values == "gradient"
    assert set(found.samples) <= set(range(100, 104))
