"""Who waits for a rank that is gone is free once the group is abandoned, whatever gloo does."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import run_fork
from jobs import wait_until

from motley.comm.collectives import abandon_group, leavable, leave_group, release_groups
from motley.launch.process import die_with_parent

CPU = torch.device("cpu")


def together(folder: Path, body: Callable[[], None]) -> None:
    """Call it on rank 0, in a group with a rank 1 that stops for ever once both have met."""

    def join(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
        )
        dist.barrier()

    def stop() -> None:
        die_with_parent()
        join(1)
        os.kill(os.getpid(), signal.SIGSTOP)

    other = multiprocessing.get_context("fork").Process(target=stop)
    other.start()
    try:
        join(0)
        state = Path(f"/proc/{other.pid}/stat")
        wait_until(lambda: state.read_text().rpartition(") ")[2].startswith("T"), 30)
        body()
    finally:
        assert other.pid is not None
        os.kill(other.pid, signal.SIGKILL)
        other.join()


def wait_for_a_stopped_rank() -> None:
    """Gloo is not told to end any connection: its thread waits on, as where it forgets."""
    sent = dist.all_reduce(torch.ones(1_000_000), async_op=True).get_future()
    threading.Timer(0.2, lambda: abandon_group((), (), ())).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="abandoned"):
        leavable(sent, CPU).wait()
    print(f"free in time: {time.monotonic() - began < 10}; sent: {sent.done()}", flush=True)
    leave_group()
    time.sleep(1.1)
    release_groups()
    print("left", flush=True)
    os._exit(0)  # as one who goes on without a lost rank ends


def test_a_wait_that_gloo_has_forgotten_ends_and_so_does_the_group(tmp_path: Path) -> None:
    done = run_fork(lambda: together(tmp_path, wait_for_a_stopped_rank))
    assert done.stdout == "free in time: True; sent: False\nleft\n", done.stderr


def what_arrives() -> None:
    """In a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sent = dist.all_reduce(torch.full((3,), 2.0), async_op=True).get_future()
    found = leavable(sent, CPU)
    (value,) = found.wait()
    abandon_group((), (), ())  # too late
    print(value.tolist(), found.value()[0].tolist())


def test_what_has_arrived_is_there_and_stays() -> None:
    assert run_fork(what_arrives).stdout == "[2.0, 2.0, 2.0] [2.0, 2.0, 2.0]\n"
