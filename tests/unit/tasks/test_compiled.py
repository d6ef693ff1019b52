"""A compiled model: its blocks once, for any number of samples, and plain again if that fails."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

from motley.measure.compile_trial import (
    _MOST_FASTER,
    Promise,
    _is_wanted,
    _Own,
    _try,
    count_steps,
    is_worth_it,
    why_not,
)
from motley.plan.speeds import SpeedTable
from motley.tasks.builtin import get_task
from motley.tasks.model import Compiled, TaskModel
from motley.tasks.net import build_net, parts_around, recompute
from motley.train.command_line import read_config, training_parser

CPU = torch.device("cpu")
CONFIG = read_config(training_parser(""), ["--model", "vit_digits", "--batch-size", "100"])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskModel]:
    # Without the code generator, which takes a C compiler and half a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    task = get_task(CONFIG)
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
    assert graphs == 4, "one for all blocks, the patch embedding, the last norm, the head"
    found += [losses(model, size) for size in (5, 13)]
    assert counters["stats"]["unique_graphs"] == graphs
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=0)
    model.compute_plainly()
    counters.clear()
    assert torch.equal(losses(model, 7), losses(model, 7)) and not counters["stats"]


def test_what_is_around_blocks_is_found_in_stages_and_lists() -> None:
    block, stage, shared = nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(4, 4)
    blocks = nn.ModuleList([block, nn.Linear(2, 2)])
    net = nn.ModuleDict({
        "stem": nn.Sequential(nn.Conv1d(1, 1, 1), nn.ReLU()), "empty": nn.Dropout(),
        "stages": nn.ModuleList([nn.ModuleDict({"down": stage, "blocks": blocks})]),
        "heads": nn.ModuleList([shared, shared]), "again": shared,
    })  # fmt: skip
    assert parts_around(net, set(blocks)) == [net["stem"], stage, shared]


def watch_compiler(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """Return a list that grows by what is variable of the first tensor of each compiled graph."""
    seen: list[list[bool]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        told = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        sizes = next(each.shape for each in told if isinstance(each, torch.Tensor))
        seen.append([isinstance(size, torch.SymInt) for size in sizes])
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend=backend))  # type: ignore[attr-defined]
    return seen


def test_samples_of_all_stages_are_of_their_own_size_and_others_of_any(
    model: TaskModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_compiler(monkeypatch)
    stages = [nn.ReLU(), nn.ReLU(), nn.ReLU()]
    Compiled(nn.Module(), (), stages, [])
    for count in (4, 3):
        for stage, size in zip(stages, (8, 5, 3), strict=True):
            assert stage(torch.ones(count, size)).shape == (count, size)
    assert seen == [[True, False]] * 3, "one for each stage, of any number of samples"
    for size in (6, 7, 9):
        assert stages[0](torch.ones(2, size)).shape == (2, size)
    assert seen[3:] == [[True, True]], "one for all sizes"
    assert torch._dynamo.config.automatic_dynamic_shapes, "of whoever compiles beside it"


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("by_blocks", [True, False])
def test_foreseen_numbers_of_samples_are_compiled_each_and_rare_ones_not(
    monkeypatch: pytest.MonkeyPatch, by_blocks: bool
) -> None:
    seen = watch_compiler(monkeypatch)
    whole = nn.ReLU()
    compiled = Compiled(whole, ("forward",), [whole] if by_blocks else [], [], {4, 6})
    for counts, graphs in (
        ((4, 6, 4, 4), [[False, False]] * 2),  # those of a step
        ((3, 4, 3, 5, 4, 3, 6), []),  # the ends of epochs and evaluations
        ((7, 8, 9, 10, 11, 12), [[True, False]]),  # another plan
    ):
        seen.clear()
        for count in counts:
            compiled.begin_pass(count)
            assert whole(torch.ones(count, 2)).shape == (count, 2)
        assert seen == graphs, counts


def test_what_is_recomputed_is_so_again_once_it_is_not_compiled(model: TaskModel) -> None:
    recompute(model.net, ["blocks"], model.task.blocks(model.net))
    before = [block.forward for block in model.task.blocks(model.net).values()]
    model.compile_task()
    model.compute_plainly()
    assert [block.forward for block in model.task.blocks(model.net).values()] == before


def test_a_part_that_is_given_more_than_tensors_is_not_compiled(model: TaskModel) -> None:
    class Dated(nn.Linear):
        def forward(self, pixels: torch.Tensor, day: int | None = None) -> torch.Tensor:
            return super().forward(pixels) + (0 if day is None else day)

    part, whole = Dated(2, 2), nn.Module()
    Compiled(whole, (), [nn.Linear(2, 2)], [part])
    pixels = torch.ones(3, 2)
    for day in range(5):
        torch.testing.assert_close(part(pixels, day=day), part(pixels, day=0) + day)
    assert not counters["stats"]
    part(pixels)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_model_that_cannot_be_compiled_computes_plainly(
    model: TaskModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no compiler is there")

    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend=broken))  # type: ignore[attr-defined]
    speed = SpeedTable((1, 8), (0.01, 0.02), 0.001)
    found, said = _try(model, speed, {8}, tmp_path / "kept", anyway=True, is_equal=False)
    assert found == speed and "not compiled" in said and "no compiler is there" in said
    assert not model.is_compiled and losses(model, 4).isfinite().all()


def test_what_is_not_faster_is_not_taken_and_that_is_remembered(
    model: TaskModel, tmp_path: Path
) -> None:
    kept, fast = tmp_path / "kept", SpeedTable((1, 8), (1e-9, 1e-9), 0.001)
    assert _try(model, fast, {8}, kept, anyway=False, is_equal=False) == (fast, "")
    assert not model.is_compiled and Promise.read(kept).gain < 0
    slow = SpeedTable((1, 8), (10.0, 20.0), 0.001)
    found, said = _try(model, slow, {8}, kept, anyway=False, is_equal=False)
    assert found.compiled and found.seconds[1] < 20 and not said and model.is_compiled
    assert found.seconds[0] / 10 == pytest.approx(found.seconds[1] / 20)


@given(st.integers(1, 10**6), st.integers(1, 300), st.integers(1, 1000))
def test_steps_of_a_run(samples: int, epochs: int, most: int) -> None:
    config = read_config(
        training_parser(""),
        ["--epochs", str(epochs), "--max-steps", str(most), "--batch-size", "100"],
    )
    assert count_steps(config, samples) == min(most, epochs * -(-samples // 100))


def test_compiling_has_to_save_more_than_it_takes(tmp_path: Path) -> None:
    usual = Promise(gain=0.2, cost_s=10)
    assert is_worth_it((8, 8), (usual, usual), 51) and not is_worth_it((8, 8), (usual, usual), 49)
    # An old GPU that cannot has a quarter of the work.
    assert is_worth_it((9, 3), (usual, None), 68) and not is_worth_it((9, 3), (usual, None), 66)
    assert not is_worth_it((8,), (None,), 1e9)
    (tmp_path / "kept").write_text("{}")
    assert Promise.read(tmp_path / "kept") == Promise.read(tmp_path / "none") == Promise()


def test_four_long_steps_are_not_compiled_for() -> None:
    """Four steps of 16 s, in which a trial took 126: its passes alone are seconds each."""
    usual = Promise()
    least_s = usual.costs_least(passes_s=15.0, kinds=1)
    assert 4 * 15.0 / _MOST_FASTER < least_s < 126
    said = why_not((usual, usual), least_s, 4 * 16.0)
    assert "at most 25 s of the 64 s that are left" in said and "takes at least 37 s" in said
    # A ViT-B/16 that steps in 0.1 s for an epoch of ImageNet is not kept from it.
    assert why_not((usual,), usual.costs_least(0.1, 1), 5000 * 0.1) == ""


def test_each_block_of_what_is_compiled_as_a_whole_takes_a_while() -> None:
    """Forty steps of 2.85 s of a GPT of 40 blocks, for which compiling took 132 s, and saved 3."""
    asks = replace(Promise(), cost_s=Promise().costs(passes_s=2.6, kinds=1, blocks=40))
    assert 120 < asks.cost_s < 140
    assert not is_worth_it((8, 8), (asks, asks), 40 * 2.85)
    assert is_worth_it((8, 8), (asks, asks), 400 * 2.85)


def test_each_kind_of_blocks_takes_a_while() -> None:
    """Eight of Swin's, for which compiling took 168 s, and saved 41 of 112 ms a step."""
    asks = replace(Promise(), cost_s=Promise().costs(passes_s=0.11, kinds=8))
    assert 120 < asks.cost_s < 168
    assert not is_worth_it((256,), (asks,), 780) and is_worth_it((256,), (asks,), 820)
    assert 15 < Promise().costs(0.1, 1) < 16, "all of a ViT's are of one kind"


@given(st.floats(0, 1e4), st.floats(0, 1e3), st.integers(1, 5))
def test_what_is_not_tried_could_not_have_paid(rest_s: float, passes_s: float, kinds: int) -> None:
    usual = Promise()
    least_s = usual.costs_least(passes_s, kinds)
    if why_not((usual, None), least_s, rest_s):
        assert rest_s - rest_s / _MOST_FASTER < least_s, "as much faster as was ever measured"
        assert not is_worth_it((4, 4), (Promise(1 - 1 / _MOST_FASTER, least_s), None), rest_s)
    assert why_not((None,), 0.0, rest_s) == ""


def test_what_a_trial_took_and_saved_is_believed(tmp_path: Path) -> None:
    Promise(0.5, 126.0).write(tmp_path / "kept")
    known = Promise.read(tmp_path / "kept")
    assert known.costs_least(passes_s=1e-3, kinds=1) == 126
    assert why_not((known,), 126, 240) and not why_not((known,), 126, 260)
    assert not why_not((Promise(0.5, 126.0, known=False),), 60, 240)


@pytest.mark.parametrize(("done", "wanted"), [(0, True), (970, False), (2000, False)])
def test_steps_that_a_resumed_run_has_taken_do_not_count(done: int, wanted: bool) -> None:
    """A thousand steps of 0.2 s, of which 30 are 6 s."""
    (least_s, kept), usual = (3.0, Path("kept")), Promise()
    told = [_Own(kept, usual, least_s, 1000, done), _Own(kept, usual, least_s, 1000, 0)]
    found, said = _is_wanted("auto", told, (8, 8), 0.2)
    assert found == wanted and ("at most 2 s" in said) == (done == 970)
    assert _is_wanted("on", told, (8, 8), 0.2) == (True, "")
    assert _is_wanted("off", told, (8, 8), 0.2) == (False, "")
    assert _is_wanted("auto", [replace(each, promise=None) for each in told], (8, 8), 9) == (
        False, "",
    )  # fmt: skip


def test_a_rank_says_what_a_trial_takes_at_least(model: TaskModel, tmp_path: Path) -> None:
    config = read_config(training_parser(""), ["--compile", "on", "--max-steps", "9"])
    speed = SpeedTable((1, 8), (2.0, 10.0), 0.001)
    own = _Own.from_rank(model, None, tmp_path / "none", config, speed, {1, 8})
    assert own.promise is not None and (own.steps, own.done) == (9, 0)
    assert own.least_s == pytest.approx(4 * 12 / _MOST_FASTER + 1)
    assert own.promise.cost_s == pytest.approx(4 * 12 + 15)
