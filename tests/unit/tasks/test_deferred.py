"""Initial numbers that are drawn later: any model's own, whatever part is asked for first."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from motley.errors import MotleyError
from motley.tasks.build import LARGE, BlockByBlock, build
from motley.tasks.builtin import get_task
from motley.tasks.deferred import record
from motley.tasks.net import find_blocks
from motley.tasks.task import Task
from motley.train.command_line import read_config, training_parser

CPU = torch.device("cpu")


class Part(nn.Module):
    """Initialised in the ways that people initialise."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.wide = nn.Linear(64, 96)
        self.weight = nn.Parameter(torch.randn(48, 64) / 8)
        self.weight.data[:10].zero_()
        nn.init.trunc_normal_(self.wide.weight, std=0.02)
        self.table = nn.Embedding(40, 48, padding_idx=3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.ones(64, 64).tril(), persistent=False)
        self.register_buffer("angles", 1e4 ** (-torch.arange(0, 4096, 2) / 4096))
        self.register_buffer("given", torch.from_numpy(np.arange(2000.0)))
        self.loud = float(self.wide.weight.std()) > 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = torch.linspace(0, 1, 2000).tolist()
        self.parts = nn.ModuleList(Part(rate) for rate in rates[:3])
        self.token, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.token.weight


def draw(order: int, fold: bool = False) -> dict[str, Tensor]:
    """All numbers, of parts that are filled one after another."""
    torch.manual_seed(1)
    net, recording = record(Net, 1)
    by_blocks = BlockByBlock(net, recording, find_blocks(net))

    def sizes() -> tuple[int, int]:
        kept = sum(value.numel() for value in net.state_dict().values())
        return sum(each.numel() for each in by_blocks.parameters()), kept

    whole = sizes()
    if fold:
        by_blocks.fold(CPU)
        assert sizes() == whole, "a checkpoint's size is known while it is folded"
        assert net.parts[2].weight is net.parts[0].weight and net.parts[2].rate > 0
        assert net.head.weight is net.token.weight and not net.head.weight.is_meta
        by_blocks.unfold()
    assert net.parts[1].wide.weight.is_meta and net.parts[1].seen.is_meta
    for part in [*net.parts, net][::order]:
        by_blocks.fill([part], CPU)
    assert net.head.weight is net.token.weight and not net.parts[1].loud
    assert len(by_blocks.parameters()) == len(list(net.parameters())) and sizes() == whole
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def test_numbers_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    one = draw(1)
    for other in (draw(-1), draw(1, fold=True)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    drawn = [one[f"parts.{n}.weight"] for n in range(3)]
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])


def test_they_are_such_as_a_whole_model_has() -> None:
    torch.manual_seed(1)
    whole, drawn = Net(), draw(1)
    for name, buffer in whole.named_buffers():
        assert torch.equal(drawn[name], buffer), name
    for name, parameter in whole.named_parameters():
        found = drawn[name]
        assert found.shape == parameter.shape and found.requires_grad
        assert torch.equal(found == 0, parameter == 0) or "bias" in name
        if parameter.numel() > 1:
            assert float(found.std() / parameter.std()) == pytest.approx(1, abs=0.3)
    assert float(drawn["parts.2.scale"]) == 0.5


class Wide(Task):
    def data(self, held_out: bool) -> list[int]:
        return [0]

    def model(self) -> nn.Module:
        """A little more than is held whole; no memory is touched."""
        return nn.Sequential(nn.Embedding(LARGE // 1000 + 1, 1000))


def config_of(*words: str) -> tuple[Task, object]:
    config = read_config(training_parser(""), words)
    return get_task(config), config


def test_size_alone_decides_and_the_user() -> None:
    task, config = config_of("--task", "text", "--width", "64")
    assert build(task, config)[1] is None
    net, by_blocks = build(Wide(), config)
    assert by_blocks is not None and next(net.parameters()).is_meta
    assert build(*config_of("--task", "text", "--width", "64", "--build", "blocks"))[1] is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--initial-checkpoint", "x.safetensors"), "--initial-checkpoint loads other weights"),
        (("--dataset", "digits", "--model", "test_resnet"), "take --build whole"),
    ],
)
def test_what_cannot_be_drawn_block_by_block_is_said(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        build(*config_of(*words, "--build", "blocks"))
