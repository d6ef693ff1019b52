"""Loader processes: as many as the host's memory has room for."""

import ctypes
import gc
import os
import socket
import subprocess

import pytest
import torch
from forked import run_fork
from hypothesis import given
from hypothesis import strategies as st

from motley.comm.modes.numbers import EXACT
from motley.data.loader import Loader
from motley.data.loader_memory import (
    count_bytes,
    explain_workers,
    free_memory,
    held,
    workers_that_fit,
)
from motley.data.source import Batch
from motley.errors import MotleyError
from motley.plan.plan import Plan
from motley.tasks.builtin import get_task
from motley.train.command_line import read_config, training_parser

GIB = 2.0**30


@given(st.integers(0, 8), st.floats(0.01, 2.0), st.integers(1, 8), st.floats(1, 99))
def test_what_is_held_fits_and_one_more_would_not(
    wanted: int, sample: float, micro_batch: int, memory: float
) -> None:
    batch = sample * micro_batch
    try:
        workers, note = workers_that_fit(wanted, sample * GIB, micro_batch, lambda: memory * GIB)
    except MotleyError:
        assert held(0) * batch > memory
        return

    def fits(count: int) -> bool:
        return held(count) * batch <= memory

    assert fits(workers) and workers <= wanted
    assert bool(note) == (workers < wanted)
    assert workers == wanted or not fits(workers + 1)


def test_fewer_processes_and_too_large_a_micro_batch_are_explained() -> None:
    workers, note = workers_that_fit(4, 0.8 * GIB, 2, lambda: 16.5 * GIB)
    assert workers == 2
    assert "2 loader processes instead of 4: a micro-batch is 2 samples of 0.80 GiB" in note
    assert "free memory is 16.50 GiB" in note
    with pytest.raises(
        MotleyError, match=r"8 samples of 0.80 GiB .* 3 micro-batches.*--micro-batch 4 f"
    ):
        workers_that_fit(0, 0.8 * GIB, 8, lambda: 10 * GIB)
    with pytest.raises(MotleyError, match="not even one sample fits: start fewer ranks per host"):
        workers_that_fit(8, 0.8 * GIB, 1, lambda: GIB)


def test_a_sample_is_as_large_as_its_part_of_the_example() -> None:
    data = {"a": torch.zeros(2, 100), "b": torch.zeros(2, dtype=torch.int64)}
    assert count_bytes(Batch(data, (0, 1))) == 408
    assert workers_that_fit(3, 0.0, 9, pytest.fail) == (3, ""), "nothing is asked of the host"
    assert 0 < free_memory(2) < 0.6 * free_memory(1)


_NEW_MOUNTS = 0x20000  # CLONE_NEWNS


def load_with_little_shared_memory() -> None:
    """Say what comes of two loaders, with little and with enough in a /dev/shm of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "no mounts of its own")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"], check=True)
    words = ["--dataset", "synthetic", "--model", "vit_tiny_patch16_224", "--img-size", "224"]
    config = read_config(training_parser(""), [*words, "--workers", "2", "--eval-samples", "64"])
    for size in ("1m", "64m"):
        gc.collect()  # or a process of the second loader forgets the first, whose are none of its
        subprocess.run(["mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)
        loader = Loader(get_task(config), config, 0, torch.device("cpu"))  # of unknown samples
        try:
            print(sum(map(len, loader.test_batches(Plan(16, (1.0,), (16,), EXACT)))))
        except MotleyError as error:
            print(error)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a /dev/shm this small")
def test_a_loader_process_without_room_is_explained_and_nobody_waits() -> None:
    done = run_fork(load_with_little_shared_memory)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    small, large = done.stdout.splitlines()
    assert f"a loader process on {socket.gethostname()} found no room in /dev/shm" in small
    assert "up to 6 at once with 2 loader processes per rank" in small
    assert "of 1.00 MiB are free in" in small and "--workers (0: none)" in small
    assert large == "64"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. \nmore", r"died: .* Killed. ;"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "died: DataLoader worker"),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It", "no room in /dev/shm"),
        ("Caught RuntimeError in DataLoader worker process 0.\nunable to mmap 9 bytes from file "
         "</torch_1>: shm", "no room in /dev/shm"),
    ],
)  # fmt: skip
def test_the_death_of_a_loader_process_is_explained(text: str, says: str) -> None:
    with pytest.raises(MotleyError, match=says), explain_workers(2):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="something else"), explain_workers(2):
        raise RuntimeError("something else")
