"""Every optimizer of timm goes on from a checkpoint to the bit, or is refused by name."""

import json
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import timm.optim
import torch
from torch import Tensor, nn

from motley.checkpoint.read import load_checkpoint
from motley.checkpoint.store import Checkpoints
from motley.config.options import Config
from motley.engines.named_state import OptimizerMemory, State, load_model_state, model_state
from motley.engines.optimizer import is_elementwise, make_optimizer, try_optimizer, try_types
from motley.errors import MotleyError
from motley.plan.length import TrainState
from motley.train.command_line import read_config, training_parser

CPU = torch.device("cpu")
NAMES = [*timm.optim.list_optimizers(), "lookahead_adamw", "lookahead_sgd", "lookahead_lamb"]


def config_of(name: str) -> Config:
    return read_config(training_parser(""), ["--opt", name])


class Training:
    """A small model of all kinds of shapes, and its optimizer."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 6)
        )
        self.net.scale = nn.Parameter(torch.ones(()))
        self.optimizer = make_optimizer(self.net, config)
        self.memory = OptimizerMemory(self.net, self.optimizer)

    def steps(self, first: int, last: int) -> None:
        """Also as the schedule does it."""
        for step in range(first, last):
            noise = torch.Generator().manual_seed(step)
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-3 / (1 + step)
            for parameter in self.net.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=noise)
            self.optimizer.step()

    def save(self, folder: Path) -> Path:
        """Save as motley.checkpoint.store does."""
        kept = self.memory.state()
        progress = {**asdict(TrainState(1)), "optimizer": kept.plain}
        return Checkpoints(folder, 1).save(model_state(self.net) | kept.tensors, progress)

    def load(self, folder: Path) -> None:
        """The other way."""
        tensors, progress = load_checkpoint(folder)
        load_model_state(self.net, tensors)
        self.memory.load(State(tensors, progress["optimizer"]))


@pytest.mark.turns
@pytest.mark.parametrize("name", NAMES)
def test_it_goes_on_to_the_bit_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    try:
        try_optimizer(config, CPU)
    except MotleyError as error:
        assert f"--opt {name}" in str(error)
        assert name.startswith(("fused", "bnb", "adahessian")), error
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        straight = Training(config)
        straight.steps(0, 8)
        resumed = Training(config)
        resumed.load(straight.save(tmp_path))
        for training in (straight, resumed):
            training.steps(8, 14)
    for one, other in zip(straight.net.parameters(), resumed.net.parameters(), strict=True):
        assert torch.equal(one, other)
    kept, again = (training.memory.state() for training in (straight, resumed))
    assert json.dumps(kept.plain) == json.dumps(again.plain)  # types too
    assert kept.tensors.keys() == again.tensors.keys()
    for key, value in kept.tensors.items():
        assert value.dtype == again.tensors[key].dtype and torch.equal(value, again.tensors[key])


def test_a_misspelt_optimizer_is_answered_with_its_neighbours() -> None:
    for name in ("adamm", "lookahead_adamm"):
        with pytest.raises(MotleyError, match=rf"--opt {name}: .*\(nearest: .*adam"):
            try_optimizer(config_of(name), CPU)


@pytest.mark.parametrize(
    ("name", "value", "cannot"),
    [
        ("clamb", torch.ones(2, dtype=torch.complex64), "complex64 of 1 dim"),
        ("adamp", torch.ones(2, 3, dtype=torch.complex64), "complex64 of 2 dim"),
        ("lamb", torch.tensor(1.0, dtype=torch.bfloat16), "bfloat16 of 0 dim"),
        ("adamw", torch.ones(2, dtype=torch.complex64), ""),
        ("lamb", torch.ones(2, dtype=torch.float64), ""),
    ],
)
def test_an_optimizer_is_refused_by_a_parameter_that_it_cannot_train(
    name: str, value: Tensor, cannot: str
) -> None:
    net = nn.Module()
    net.plain, net.turned = nn.Linear(3, 3), nn.Parameter(value)
    if not cannot:
        try_types(config_of(name), net, CPU)
        return
    with pytest.raises(MotleyError, match=rf"--opt {name} cannot train .* turned .{cannot}"):
        try_types(config_of(name), net, CPU)


def test_what_the_options_decide_is_not_loaded(tmp_path: Path) -> None:
    straight = Training(config_of("lamb"))
    straight.steps(0, 3)
    config = read_config(training_parser(""), ["--opt", "lamb", "--weight-decay", "0.3"])
    resumed = Training(config)
    resumed.load(straight.save(tmp_path))
    groups = resumed.optimizer.param_groups
    assert [group["step"] for group in groups] == [3, 3]
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}


def test_a_checkpoint_that_says_tensors_alone_is_read() -> None:
    straight = Training(config_of("adamw"))
    straight.steps(0, 3)
    resumed = Training(config_of("adamw"))
    resumed.memory.load(State(straight.memory.state().tensors))
    for one, other in zip(straight.memory.slots().values(), resumed.memory.slots().values(),
                          strict=True):  # fmt: skip
        assert all(torch.equal(one[slot], other[slot]) for slot in one)


class Noisy(torch.optim.SGD):
    """Draws from torch's own generator."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Add some noise."""
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(torch.randn_like(parameter))


class Secretive(torch.optim.SGD):
    """Keeps a number where nobody looks."""

    taken = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Each one a little smaller."""
        self.taken += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad / self.taken)


@pytest.mark.parametrize(
    ("kind", "says"), [(Noisy, "random numbers"), (Secretive, "does not save")]
)
def test_what_cannot_go_on_is_refused(
    kind: type[torch.optim.SGD], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "motley.engines.optimizer.make_optimizer",
        lambda net, *_: kind(net.parameters(), lr=0.1),
    )
    before: Tensor = torch.get_rng_state()
    with pytest.raises(MotleyError, match=says):
        try_optimizer(config_of("sgd"), CPU)
    assert torch.equal(before, torch.get_rng_state())


def test_zero_cuts_what_looks_at_single_numbers_alone() -> None:
    for name in ("adamw", "sgd", "lion", "adan", "madgrad", "nadamlegacy"):
        assert is_elementwise(config_of(name)), name
    # Norms of tensors, their means, their shapes.
    for name in ("lamb", "lars", "cadamw", "clion", "adamp", "sgdp", "mars", "muon", "adafactor"):
        assert not is_elementwise(config_of(name)), name
