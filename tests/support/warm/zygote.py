"""A process that has imported all that a rank needs, and forks a rank whenever one is asked for.

A rank of a short job spends most of its time on importing torch; a fork of a process that has done
so begins at once, and may still be killed, run out of memory or hang like any other process.

    python -m warm.zygote MODULE ...    # imported once; then jobs, lines of JSON, on standard input

    {"ranks": 3, "body": "fuzz.rank:main", "argument": {...}, "folder": "/tmp/x", "limit": 30}
    -> {"codes": [0, 0, -9], "timed_out": false}

Each rank calls ``body(launched, argument)``; its output is in ``folder/rank<k>.txt``, its process's
number in ``folder/rank<k>.pid``. Torch must not have begun to use threads or a GPU here: neither
survives a fork.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from warm.fork import end_with

GRACE = 30.0  # seconds in which the others should end by themselves once a rank has failed
_LENGTH = struct.Struct("!Q")


class ForkedRanks:
    """Implements motley.launch.ranks.Launched over a socket to the process that forked the rank."""

    def __init__(self, rank: int, size: int, line: socket.socket) -> None:
        self.rank, self.size, self._line = rank, size, line

    def allgather(self, value: Any) -> list[Any]:
        """See Launched."""
        content = pickle.dumps(value)
        self._line.sendall(_LENGTH.pack(len(content)) + content)
        return [pickle.loads(_read_message(self._line)) for _ in range(self.size)]

    def on_this_machine(self) -> list[int]:
        """See Launched."""
        return list(range(self.size))


def _read_message(line: socket.socket) -> bytes:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = line.recv(count - len(data))
            if not more:
                raise ConnectionError("the process that forked this rank is gone")
            data += more
        return data

    return exactly(_LENGTH.unpack(exactly(_LENGTH.size))[0])


def begin_rank(rank: int, job: dict[str, Any], group: int, line: socket.socket) -> NoReturn:
    """What a fork does: become a rank, call the job's body, end."""

    def body_of_job() -> None:
        os.setpgid(0, group)
        output = os.open(Path(job["folder"]) / f"rank{rank}.txt",
                         os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # fmt: skip
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        names = {"RANK": rank, "SIZE": job["ranks"], "LOCAL_RANK": rank, "LOCAL_SIZE": job["ranks"]}
        os.environ |= {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
        module, _, function = job["body"].partition(":")
        body = getattr(importlib.import_module(module), function)
        body(ForkedRanks(rank, job["ranks"], line), job["argument"])

    end_with(body_of_job)


@dataclass
class Job:
    """A job that runs.

    Attributes:
        pids, lines: of its ranks; a line is None when its rank has ended.
        said: what each rank has given to the allgather that is under way.
        codes: of ranks that have ended; negative: the signal.
    """

    pids: list[int]
    lines: list[socket.socket | None]
    deadline: float
    said: dict[int, bytes] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    timed_out: bool = False

    def hear(self, rank: int) -> None:
        """A rank has said something, or has ended."""
        line = self.lines[rank]
        assert line is not None
        try:
            content = _read_message(line)
        except OSError:
            line.close()
            self.lines[rank] = None
            self._bury(rank)
            return
        self.said[rank] = content
        if len(self.said) == len(self.pids):
            answer = b"".join(_LENGTH.pack(len(self.said[k])) + self.said[k]
                              for k in sorted(self.said))  # fmt: skip
            self.said = {}
            for other in self.lines:
                if other is not None:
                    other.sendall(answer)

    def _bury(self, rank: int) -> None:
        _, status = os.waitpid(self.pids[rank], 0)
        self.codes[rank] = os.waitstatus_to_exitcode(status)
        if self.codes[rank] != 0:  # as mpirun does, only later: what the others say is wanted
            self.deadline = min(self.deadline, time.monotonic() + GRACE)

    def kill(self) -> None:
        """End what is left of the ranks; those that hang say where."""
        if not any(self.codes.values()):
            self.timed_out = True
            for rank, line in enumerate(self.lines):
                if line is not None:
                    os.kill(self.pids[rank], signal.SIGUSR1)
            time.sleep(0.5)
        os.killpg(self.pids[0], signal.SIGKILL)
        self.deadline = float("inf")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of a job, let them talk, and wait for their end."""
    pairs = [socket.socketpair() for _ in range(job["ranks"])]
    pids: list[int] = []
    for rank, (_, theirs) in enumerate(pairs):
        pid = os.fork()
        if pid == 0:
            for other, pair in enumerate(pairs):
                pair[0].close()
                if other != rank:
                    pair[1].close()
            begin_rank(rank, job, pids[0] if pids else 0, theirs)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
        (Path(job["folder"]) / f"rank{rank}.pid").write_text(f"{pid}\n")
    for _, theirs in pairs:
        theirs.close()
    here = Job(pids, [ours for ours, _ in pairs], time.monotonic() + job["limit"])
    with selectors.DefaultSelector() as selector:
        for rank, (ours, _) in enumerate(pairs):
            selector.register(ours, selectors.EVENT_READ, rank)
        while len(here.codes) < len(pids):
            wait = here.deadline - time.monotonic()
            for key, _ in selector.select(max(0.0, min(wait, 3600.0))):
                here.hear(key.data)
                if here.lines[key.data] is None:
                    selector.unregister(key.fileobj)
            if time.monotonic() >= here.deadline:
                here.kill()
    return {"codes": [here.codes[rank] for rank in range(len(pids))], "timed_out": here.timed_out}


def main() -> None:
    """Serve jobs until standard input ends."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")  # what an import prints is no answer
    os.dup2(2, 1)
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    with contextlib.suppress(BrokenPipeError):  # who asked is gone
        for line in sys.stdin:
            print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
