"""A compiled model: its blocks once, for any number of samples, and plain again if that fails."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from motley.plan.speed_table import SpeedTable
from motley.planner.compile_trial import Promise, _try, is_worth_it, steps_of
from motley.tasks.find import task_of
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net
from motley.train.command_line import read_config, training_parser

CPU = torch.device("cpu")
CONFIG = read_config(training_parser(""), ["--model", "vit_digits", "--batch-size", "100"])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskModel]:
    # Without the code generator, which takes a C compiler and half a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    task = task_of(CONFIG)
    yield TaskModel(task, build_net(task, CONFIG), "fp32", CPU)
    torch._dynamo.reset()


def losses(model: TaskModel, size: int) -> torch.Tensor:
    found: torch.Tensor = model(model.noise(size))
    found.sum().backward()
    return found.detach()


def test_blocks_are_compiled_once_for_any_number_of_samples(model: TaskModel) -> None:
    plain = [losses(model, size) for size in (8, 5, 13)]
    model.compile_task()
    found = [losses(model, 8)]
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs < len(model.task.blocks(model.net))
    found += [losses(model, size) for size in (5, 13)]
    assert counters["stats"]["unique_graphs"] == graphs
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=0)
    model.compute_plainly()
    counters.clear()
    assert torch.equal(losses(model, 7), losses(model, 7)) and not counters["stats"]


def test_a_model_that_cannot_be_compiled_computes_plainly(
    model: TaskModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no compiler is there")

    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend=broken))  # type: ignore[attr-defined]
    speed = SpeedTable((1, 8), (0.01, 0.02), 0.001)
    found, said = _try(model, speed, {8}, tmp_path / "kept", anyway=True)
    assert found == speed and "not compiled" in said and "no compiler is there" in said
    assert not model.is_compiled and losses(model, 4).isfinite().all()


def test_what_is_not_faster_is_not_taken_and_that_is_remembered(
    model: TaskModel, tmp_path: Path
) -> None:
    kept, fast = tmp_path / "kept", SpeedTable((1, 8), (1e-9, 1e-9), 0.001)
    assert _try(model, fast, {8}, kept, anyway=False) == (fast, "")
    assert not model.is_compiled and Promise.read(kept).gain < 0
    slow = SpeedTable((1, 8), (10.0, 20.0), 0.001)
    found, said = _try(model, slow, {8}, kept, anyway=False)
    assert found.compiled and found.seconds[1] < 20 and not said and model.is_compiled
    assert found.seconds[0] / 10 == pytest.approx(found.seconds[1] / 20)


@given(st.integers(1, 10**6), st.integers(1, 300), st.integers(1, 1000))
def test_steps_of_a_run(samples: int, epochs: int, most: int) -> None:
    config = read_config(
        training_parser(""),
        ["--epochs", str(epochs), "--max-steps", str(most), "--batch-size", "100"],
    )
    assert steps_of(config, samples) == min(most, epochs * -(-samples // 100))


def test_compiling_has_to_save_more_than_it_takes(tmp_path: Path) -> None:
    usual = Promise(gain=0.2, cost_s=10)
    assert is_worth_it((8, 8), (usual, usual), 51) and not is_worth_it((8, 8), (usual, usual), 49)
    # An old GPU that cannot has a quarter of the work.
    assert is_worth_it((9, 3), (usual, None), 68) and not is_worth_it((9, 3), (usual, None), 66)
    assert not is_worth_it((8,), (None,), 1e9)
    (tmp_path / "kept").write_text("{}")
    assert Promise.read(tmp_path / "kept") == Promise.read(tmp_path / "none") == Promise()
