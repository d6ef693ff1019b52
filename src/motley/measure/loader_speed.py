"""The speed at which a rank reads its samples: each is read, changed and put into a batch."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from motley.cluster.binding import cores_per_rank
from motley.config.options import Config
from motley.data.keyed import Key, Keyed
from motley.data.loader import ranks_here, samples_on, workers_of
from motley.data.source import Samples
from motley.plan.speed_table import SpeedTable

_SECONDS = 0.2  # of reading
_BATCH = 8  # samples that are put together
_AHEAD = 2.0  # times what the device computes: each reads a whole batch, and is late now and then
_MOST = 16  # loader processes of a rank


def with_reading(
    speed: SpeedTable, samples: Samples, config: Config, device: torch.device
) -> SpeedTable:
    """The speed of a rank that also reads its samples; all ranks of a host call it at once.

    What is in memory is not timed: to read it takes no time that counts.
    """
    samples = samples_on(samples, config, device)
    if not samples.needs_workers and not config.workers:
        return speed
    with _threads(torch.get_num_threads() if device.type == "cpu" and not config.workers else 1):
        one_s = time_reading(samples, config.seed)
    return _with_readers(speed, one_s, samples, config, device)


def with_readers_of_compiled(
    speed: SpeedTable, samples: Samples, config: Config, device: torch.device
) -> SpeedTable:
    """Return the speed of a rank with as many loader processes as its compiled model needs.

    Args:
        speed: compiled, with the loader processes that the plain model needs.
    """
    if not speed.input_s:
        return speed
    one_s = speed.input_s * _at_once(speed.readers or 0, device)
    return _with_readers(speed, one_s, samples, config, device)


def _with_readers(
    speed: SpeedTable, one_s: float, samples: Samples, config: Config, device: torch.device
) -> SpeedTable:
    """Return the speed with its loader processes.

    Args:
        one_s: seconds that one of them takes for a sample.
    """
    readers = math.ceil(_AHEAD * speed.rate * one_s)
    readers = workers_of(samples, config, device, min(_MOST, max(1, readers)))
    return replace(
        speed, input_s=one_s / _at_once(readers, device), readers=readers,
        reads_ahead=readers > 0 and _spare(device) >= 1,
    )  # fmt: skip


def _at_once(readers: int, device: torch.device) -> float:
    """Return how many of a rank's loader processes read at the same time."""
    if not readers:
        return 1.0
    spare = _spare(device)
    # What has no core of its own takes its time from what is computed.
    return min(readers, spare) if spare >= 1 else cores_per_rank(ranks_here())


def _spare(device: torch.device) -> int:
    """Return the number of a rank's cores that do not compute or feed its device."""
    return cores_per_rank(ranks_here()) - (torch.get_num_threads() if device.type == "cpu" else 1)


def time_reading(samples: Samples, seed: int) -> float:
    """Seconds that one process takes for a sample, of training samples anywhere in the set.

    Raises:
        MotleyError: no sample can be read.
    """
    keyed = Keyed(samples, training=True)
    chance = torch.Generator().manual_seed(seed + os.getpid())  # not what another rank reads too

    def batch() -> None:
        chosen = torch.randint(len(keyed), (_BATCH,), generator=chance).tolist()
        keyed.batch(keyed.__getitems__([Key(index, index) for index in chosen]))

    batch()  # opens what is opened once
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < _SECONDS or not count:
        batch()
        count += _BATCH
    return spent / count


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """As many threads as who reads has."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
