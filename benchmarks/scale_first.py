"""Rank 0 of scale_ranks.py, with the real supervisor: `python benchmarks/scale_first.py RANKS`.

It says its port and token, and when all have come; then, for each line with a number of seconds,
what it took of a core in these, when nothing else ran here, and of as many more, in which part of
them a thread that computes in Python, as one that trains, was kept from it: {"core": 0.03,
"kept_from": 0.02}.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import result  # noqa: F401  finds src

from motley.faults import Phase
from motley.launch.process import allow_files
from motley.membership.supervisor import Supervisor

_HOST_RANKS = 8  # of a usual GPU host


_PAUSE_S = 1e-4  # of what takes a tenth of that: somebody else had the interpreter, or the core


def _paused(seconds: float) -> float:
    """The part of its time that this thread, which computes, is kept from it."""
    begin = last = time.perf_counter()
    lost = 0.0
    while last - begin < seconds:
        sum(range(500))
        now = time.perf_counter()
        lost += now - last if now - last > _PAUSE_S else 0.0
        last = now
    return lost / (last - begin)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    """Be rank 0 until the job ends, or the input does."""
    size = int(sys.argv[1])
    allow_files(size, first=True)
    supervisor = Supervisor(0, size, "host0")
    own = supervisor.listen("127.0.0.1")
    _say(port=own.port, token=own.token)
    started = time.monotonic()
    supervisor.join([own] * size, [rank // _HOST_RANKS * _HOST_RANKS for rank in range(size)])
    while len(supervisor.connections()) < size - 1:
        time.sleep(0.01)
    supervisor.set_status(Phase.FORWARD, 120.0)
    _say(
        joined_s=time.monotonic() - started, files=len([*Path("/proc/self/fd").iterdir()]),
        files_allowed=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )  # fmt: skip
    for line in sys.stdin:
        begin, cpu = time.monotonic(), time.process_time()
        time.sleep(float(line))
        core = (time.process_time() - cpu) / (time.monotonic() - begin)
        _say(core=core, kept_from=_paused(float(line)))
    os._exit(0)  # the others say nothing of their end


if __name__ == "__main__":
    main()
