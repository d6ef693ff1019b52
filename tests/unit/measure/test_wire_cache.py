"""What links and wires were measured to be, from one run to the next."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.comm.modes import parse_wire
from motley.comm.modes.local_sgd import LocalSgd
from motley.comm.modes.numbers import BF16, EXACT
from motley.comm.modes.power_sgd import PowerSgd
from motley.measure import measured_plan, speed_cache
from motley.measure.speed_cache import WireCache, WireFigures, WireMemory
from motley.plan.speeds import Flow, rounds
from motley.plan.wire import AllReduceCost, FewerCost

MACHINES = (0, 1, 2)
FLOWS = {
    pair: Flow(1e6 * (1 + sum(pair)), 1e-4)
    for meet in rounds(MACHINES) for a, b in meet for pair in ((a, b), (b, a))
}  # fmt: skip
FIGURES = WireFigures(
    FLOWS, {EXACT: (1e-3, 0.5), replace(EXACT, slow_rank=2): (2e-3, 0.25)},
    fewer=FewerCost((0, 1), 0.125),
)  # fmt: skip


def cache_in(folder: Path, key: str = "a") -> WireCache:
    return WireCache(folder / "wire-x.json", {"hosts": key}, MACHINES)


def test_what_is_kept_is_taken_once(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    assert cache.take() is None
    WireMemory(cache, FIGURES, False).keep(1.25)
    assert cache.take() == replace(FIGURES, steps_took=1.25)
    assert cache.take() is None  # whose job ends before a step has shown that they hold
    assert list(tmp_path.iterdir()) == []


def test_of_another_key_or_day_it_is_nothing(tmp_path: Path) -> None:
    cache_in(tmp_path).keep(FIGURES)
    assert cache_in(tmp_path, "b").take() is None
    for age_s in (-3600.0, 25 * 3600.0):
        cache_in(tmp_path).keep(replace(FIGURES, measured=time.time() - age_s))
        assert cache_in(tmp_path).take() is None
    cache_in(tmp_path).keep(old := replace(FIGURES, measured=time.time() - 23 * 3600.0))
    assert cache_in(tmp_path).take() == old


def change(*path: object, to: object) -> Callable[[Any], None]:
    """A change deep in a file's content."""

    def do(content: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = to

    return do


@pytest.mark.parametrize(
    "damage",
    [
        change("figures", to=None), change("figures", to=[]), change("key", to=[]),
        change("figures", "measured", to="today"), change("figures", "measured", to=None),
        change("figures", "steps_took", to=0), change("figures", "steps_took", to=True),
        change("figures", "flows", 0, 2, to=0), change("figures", "flows", 0, 2, to=-1.0),
        change("figures", "flows", 0, 2, to=1e999), change("figures", "flows", 0, 3, to="x"),
        change("figures", "flows", 0, 0, to=[]), change("figures", "flows", 0, to=[0, 1]),
        change("figures", "flows", to={}), change("figures", "flows", to=[]),
        change("figures", "flows", to=[[0, 1, 1.0, 1.0], [1, 0, 1.0, 1.0]]),
        change("figures", "wires", to=[]), change("figures", "wires", "auto", to=[0.0, 1.0]),
        change("figures", "wires", "exakt", to=[0.0, 1.0]),
        change("figures", "wires", "exact", to=[0.0]),
        change("figures", "wires", "exact", to=[0.0, None]),
        change("figures", "fewer", to=[0, 1]), change("figures", "fewer", "ranks", to=[0, 3]),
        change("figures", "fewer", "ranks", to=[0, 1, 2]),
        change("figures", "fewer", "transfer_s", to="x"),
    ],
)  # fmt: skip
def test_a_file_with_something_else_in_it_is_nothing(
    tmp_path: Path, damage: Callable[[Any], None]
) -> None:
    cache = cache_in(tmp_path)
    cache.keep(FIGURES)
    content = json.loads(cache.path.read_text())
    damage(content)
    cache.path.write_text(json.dumps(content))
    assert cache.take() is None


@given(cut=st.integers(0, 400), put=st.binary(max_size=8))
def test_a_damaged_file_is_nothing_or_what_it_was(
    tmp_path_factory: pytest.TempPathFactory, cut: int, put: bytes
) -> None:
    cache = cache_in(tmp_path_factory.mktemp("cache"))
    cache.keep(FIGURES)
    whole = cache.path.read_bytes()
    cache.path.write_bytes(whole[:cut] + put)
    assert cache.take() is None or whole[:cut] + put == whole


def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    os.mkfifo(cache.path)
    assert cache.take() is None  # and nobody waits for a writer
    cache.path.unlink()
    WireCache(tmp_path / "other", cache.key, MACHINES).keep(FIGURES)
    cache.path.symlink_to(tmp_path / "other")
    assert cache.take() is None
    cache.path.unlink()
    cache.path.write_text("[" * 200_000)
    assert cache.take() is None
    with cache.path.open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert cache.take() is None


def test_a_full_disk_costs_a_measurement_alone(tmp_path: Path) -> None:
    WireCache(tmp_path / "gone" / "wire-x.json", {}, MACHINES).keep(FIGURES)


MODES = st.sampled_from([EXACT, BF16, PowerSgd(4), PowerSgd(8, rounded=True),
                         replace(BF16, slow_rank=1)])  # fmt: skip
SECONDS = st.floats(0, 1e6)


@given(
    rates=st.lists(st.floats(1e-3, 1e12), min_size=6, max_size=6),
    wires=st.dictionaries(MODES, st.tuples(SECONDS, SECONDS)),
    took=st.floats(1e-3, 1e3),
    fewer=st.none() | st.builds(FewerCost, st.just((0, 2)), SECONDS),
)
def test_figures_come_back_as_they_were(
    rates: list[float], wires: Any, took: float, fewer: FewerCost | None
) -> None:
    flows = {pair: Flow(rate, 1e-5) for pair, rate in zip(FLOWS, rates, strict=True)}
    figures = WireFigures(flows, wires, 1.5e9, took, fewer)
    again = WireFigures.from_json(json.loads(json.dumps(figures.as_json())), MACHINES)
    assert again == figures
    assert all(parse_wire(str(mode)) == mode for mode in again.wires)


def test_what_follows_from_another_mode_is_not_kept() -> None:
    costs = {EXACT: AllReduceCost(1.0, 2.0), LocalSgd(4): AllReduceCost(1.0, 2.0, sync_every=4)}
    assert WireFigures().with_wires(costs).wires == {EXACT: (1.0, 2.0)}


class Linear(torch.nn.Linear):
    """Stands for a TaskModel."""

    def every_parameter(self) -> list[torch.nn.Parameter]:
        return list(self.parameters())


WORKER = SimpleNamespace(rank=0, device="cpu", precision="fp32")


def key_of(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """The place and key of a job of one rank, with something changed."""
    of = {
        "address": "10.0.0.1", "interface": "eth0", "host": "a", "machines": [0], "asked": None,
        "backend": "gloo", "worker": WORKER, "model": Linear(2, 3), "versions": {"a": 1},
        "nccl": None,
    } | changes  # fmt: skip
    monkeypatch.setattr(speed_cache, "versions", lambda: of["versions"])
    monkeypatch.setattr(speed_cache, "nccl_version", lambda: of["nccl"])
    world: Any = SimpleNamespace(
        network=SimpleNamespace(address=of["address"], interface=of["interface"]),
        machines=of["machines"], nodes=[SimpleNamespace(host=of["host"])] * 2,
        allgather=lambda own: [own] * len(of["machines"]),
    )  # fmt: skip
    group: Any = SimpleNamespace(workers=[of["worker"]], backend=of["backend"])
    found = speed_cache.wire_cache(world, group, of["model"], of["asked"])
    return found.path.name, found.key


FROZEN = Linear(2, 3)
FROZEN.bias.requires_grad = False


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "10.0.0.2"}, {"interface": "eth1"}, {"host": "b"}, {"machines": [0, 0]},
        {"backend": "nccl"}, {"asked": BF16}, {"versions": {"a": 2}}, {"nccl": [2, 21, 5]},
        {"model": Linear(3, 2)}, {"model": FROZEN},
        *({"worker": SimpleNamespace(**{**vars(WORKER), **one})}
          for one in ({"device": "cuda:0 NVIDIA H200"}, {"precision": "bf16"})),
    ],
    ids=str,
)  # fmt: skip
def test_all_that_the_wire_depends_on_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    usual = key_of(monkeypatch)
    assert key_of(monkeypatch) == usual
    other = key_of(monkeypatch, **changes)
    assert other[0] != usual[0] and other[1] != usual[1]


def test_what_a_user_tells_nccl_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = key_of(monkeypatch)
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert key_of(monkeypatch)[0] != usual[0]


@pytest.mark.parametrize(("leaves_out", "measured"), [(False, [True]), (True, [True, False])])
def test_no_machine_is_left_out_for_what_is_remembered(
    monkeypatch: pytest.MonkeyPatch, leaves_out: bool, measured: list[bool]
) -> None:
    asked: list[bool] = []  # with remembered figures, or without

    def measure(*words: Any) -> Any:
        asked.append(words[-1] is not None)
        return SimpleNamespace(figures=FIGURES)

    choice = SimpleNamespace(ranks=(0, 1) if leaves_out else (0, 1, 2))
    for name, stub in {
        "Traffic": lambda *_: None, "measure_speeds": lambda *_: (),
        "wire_cache": lambda *_: "cache", "recall": lambda *_: FIGURES,
        "measure_between": measure, "_limited": lambda found, *_: found,
        "_options": lambda *_: {EXACT: choice}, "_best_mode": lambda *_: EXACT,
    }.items():  # fmt: skip
        monkeypatch.setattr(measured_plan, name, stub)
    world: Any = SimpleNamespace(network=SimpleNamespace(interface="eth0"), first_here=True)
    group: Any = SimpleNamespace(size=3, precisions=())
    unknown: Any = object()
    job = measured_plan._Job(world, unknown, group, None, unknown, unknown, None)
    *_, memory = measured_plan._measure(job, None)
    assert asked == measured
    assert (memory is None) == leaves_out
