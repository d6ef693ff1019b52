"""Measures how quickly a rank reads its samples: each is read, changed and put into a batch."""

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
from motley.data.loader import ranks_here, workers_of
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
    if not samples.needs_workers and not config.workers:
        return speed
    cores = cores_per_rank(ranks_here())
    on_cpu = device.type == "cpu"
    with _threads(torch.get_num_threads() if on_cpu and not config.workers else 1):
        one_s = time_reading(samples, config.seed)
    readers = math.ceil(_AHEAD * speed.rate * one_s)
    readers = workers_of(samples, config, device, min(_MOST, max(1, readers)))
    spare = cores - (torch.get_num_threads() if on_cpu else 1)
    ahead = readers > 0 and spare >= 1
    # What has no core of its own takes its time from what is computed.
    at_once = min(readers, spare) if ahead else max(1.0, cores) if readers else 1.0
    return replace(speed, input_s=one_s / at_once, reads_ahead=ahead, readers=readers)


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
