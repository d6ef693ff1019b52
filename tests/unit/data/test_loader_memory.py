"""Loader processes: as many as the host's memory has room for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.data.batch import Batch
from motley.data.loader_memory import PREFETCH, Free, bytes_of, held, workers_that_fit
from motley.errors import MotleyError

GIB = 2.0**30


@given(
    st.integers(0, 8), st.floats(0.01, 2.0), st.integers(1, 8), st.floats(1, 99), st.floats(0, 99)
)
def test_what_is_held_fits_and_one_more_would_not(
    wanted: int, sample: float, micro_batch: int, memory: float, shared: float
) -> None:
    free = Free(memory * GIB, shared * GIB)
    batch = sample * micro_batch
    try:
        workers, note = workers_that_fit(wanted, sample * GIB, micro_batch, lambda: free)
    except MotleyError:
        assert held(0) * batch > memory
        return

    def fits(count: int) -> bool:
        return held(count) * batch <= memory and count * PREFETCH * batch <= shared

    assert fits(workers) and workers <= wanted
    assert bool(note) == (workers < wanted)
    assert workers == wanted or not fits(workers + 1)


def test_fewer_processes_and_too_large_a_micro_batch_are_explained() -> None:
    workers, note = workers_that_fit(4, 0.8 * GIB, 2, lambda: Free(16 * GIB, 50 * GIB))
    assert workers == 2
    assert "2 loader processes in place of 4: 2 samples of 0.80 GiB" in note
    assert "free memory is 16.00 GiB" in note
    workers, note = workers_that_fit(4, GIB / 100, 2, lambda: Free(99 * GIB, GIB / 16))
    assert workers == 1 and "/dev/shm is 0.06 GiB" in note
    with pytest.raises(MotleyError, match=r"8 samples of 0.80 GiB .* 3 of them.*--micro-batch 4 f"):
        workers_that_fit(0, 0.8 * GIB, 8, lambda: Free(10 * GIB, 0))
    with pytest.raises(MotleyError, match="no sample fits: take fewer ranks a host"):
        workers_that_fit(8, 0.8 * GIB, 1, lambda: Free(GIB, 0))


def test_a_sample_is_as_large_as_its_part_of_the_example() -> None:
    data = {"a": torch.zeros(2, 100), "b": torch.zeros(2, dtype=torch.int64)}
    assert bytes_of(Batch(data, (0, 1))) == 408
    assert workers_that_fit(3, 0.0, 9, pytest.fail) == (3, ""), "nothing is asked of the host"
    here, half = Free.here(1), Free.here(2)
    assert 0 < half.memory < 0.6 * here.memory and half.shared < here.shared
