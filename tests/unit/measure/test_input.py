"""What a rank reads in a second: timed, and turned into what a plan is made from."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from motley.config.options import Config
from motley.measure.profile import time_reading, with_readers_of_compiled, with_reading
from motley.plan.speeds import SpeedTable

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SAMPLE_S = 0.01
COMPUTES = SpeedTable((1, 2, 4), (0.005, 0.010, 0.020), 0.001)  # 200 samples a second


class Slow:
    """Samples that take their time, and no processor."""

    needs_workers, weight = True, 1.0

    def data(self, held_out: bool) -> range:
        return range(100)

    def sample(self, item: int, training: bool) -> Mapping[str, Any]:
        time.sleep(SAMPLE_S)
        return {"x": torch.tensor(float(item))}

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return {"x": torch.stack([each["x"] for each in samples])}

    def on(self, device: torch.device) -> "Slow":
        return self

    def complete(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def weights(self, batch: dict[str, Tensor]) -> None:
        return None

    def costs(self, indices: Sequence[int]) -> None:
        return None

    def name_of(self, source: range, index: int) -> str:
        return str(index)


class Quick(Slow):
    """The same in memory."""

    needs_workers = False


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have a host of so many cores and ranks; threads: that a CPU rank computes with."""

    def have(cores: int, ranks: int, threads: int = 1) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    return have


def config(workers: int | None = None) -> Config:
    return Config(workers=workers)


def test_a_reader_is_timed_and_draws_no_random_numbers_of_the_models() -> None:
    before = torch.get_rng_state()
    assert SAMPLE_S <= time_reading(Slow(), seed=0) < 1.5 * SAMPLE_S
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("device", "workers", "host", "readers", "ahead", "at_once"),
    [
        (CPU, None, (8, 1, 8), 0, False, 1),  # it reads by itself, and computes then
        (CPU, 1, (8, 1, 1), 1, True, 1),  # on a core that is free
        (CPU, 4, (8, 1, 6), 4, True, 2),  # on two of them
        (CPU, 2, (2, 1, 2), 2, False, 2),  # on the cores that compute
        (GPU, None, (16, 1), 5, True, 5),  # 200 samples a second, and as many more
        (GPU, None, (16, 8), 1, True, 1),  # more would keep it busy, had it more cores
        (GPU, 8, (16, 2), 8, True, 7),  # one core feeds the GPU
        (GPU, 0, (16, 1), 0, False, 1),
    ],
)
def test_its_rate_is_that_of_its_processes_as_far_as_it_has_cores(
    cores: Any, device: torch.device, workers: int | None, host: tuple[int, ...],
    readers: int, ahead: bool, at_once: int,
) -> None:  # fmt: skip
    cores(*host)
    speed = with_reading(COMPUTES, Slow(), config(workers), device)
    assert (speed.readers, speed.reads_ahead) == (readers, ahead)
    assert SAMPLE_S / at_once <= speed.input_s < 1.5 * SAMPLE_S / at_once
    assert speed.computing() == COMPUTES and speed.rate == COMPUTES.rate


@pytest.mark.parametrize(
    ("device", "workers", "host", "most"),
    [
        (GPU, None, (16, 1), 15),
        (GPU, None, (8, 1), 7),  # as its cores allow
        (GPU, 5, (16, 1), 5),  # a user's number stays
        (CPU, None, (8, 1, 8), 0),
    ],
)
def test_a_compiled_model_has_the_loader_processes_that_it_needs(
    cores: Any, device: torch.device, workers: int | None, host: tuple[int, ...], most: int
) -> None:
    cores(*host)
    plain = with_reading(COMPUTES, Slow(), config(workers), device)
    one_s = plain.input_s * (plain.readers or 1)
    compiled = plain.compiled_as({4: COMPUTES.seconds[-1] / 2})
    speed = with_readers_of_compiled(compiled, Slow(), config(workers), device)
    readers = min(most, math.ceil(2 * 400 * one_s))  # 400 samples a second, and as many more
    assert speed.readers == readers
    assert speed.input_s == pytest.approx(one_s / max(1, readers))
    assert speed.reads_ahead == plain.reads_ahead


def test_what_is_in_memory_is_not_timed() -> None:
    started = time.perf_counter()
    assert with_reading(COMPUTES, Quick(), config(), CPU) == COMPUTES
    assert time.perf_counter() - started < 0.1
