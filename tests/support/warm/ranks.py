"""Jobs of several ranks that begin at once: see warm.zygote."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project import LIMIT_S, ROOT

FOLDERS = ("tests/support", "src", "torch_dist", "deepspeed")


@dataclass(frozen=True)
class Ended:
    """A job that ended.

    Attributes:
        codes: of its ranks; negative: the signal that ended it.
        output: of all ranks, one after another.
    """

    codes: tuple[int, ...]
    timed_out: bool
    output: str


class WarmRanks:
    """Ranks on this machine, of processes that have imported ``modules``; a context manager.

    Args:
        root: of the repository, or of a copy with all of ``FOLDERS``.
    """

    def __init__(self, modules: Sequence[str], root: Path = ROOT) -> None:
        folders = [str(root / name) for name in FOLDERS]
        path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
        self._modules = modules
        self._environment = {
            **os.environ, "PYTHONPATH": path.rstrip(os.pathsep),
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other check begins to use CUDA
        }  # fmt: skip
        self._process: subprocess.Popen[str] | None = None  # until somebody needs it

    def run(
        self, ranks: int, body: str, argument: Any, folder: Path, limit: float = LIMIT_S
    ) -> Ended:
        """Run ``body``, as in ``module:function``, on so many ranks, and wait for its end.

        Args:
            argument: given to each rank; of what JSON knows.
            folder: for the ranks' output; made if need be.
            limit: seconds, after which the ranks are killed.
        """
        process = self._begun()
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*.txt"):
            old.unlink()
        job = {"ranks": ranks, "body": body, "argument": argument, "folder": str(folder),
               "limit": limit}  # fmt: skip
        print(json.dumps(job), file=process.stdin, flush=True)
        answer = _answer(process)
        texts = [folder / f"rank{rank}.txt" for rank in range(ranks)]
        output = "".join(text.read_text(errors="replace") for text in texts if text.exists())
        return Ended(tuple(answer["codes"]), answer["timed_out"], output)

    def _begun(self) -> "subprocess.Popen[str]":
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "warm.zygote", *self._modules], env=self._environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            keep_place(self._process.pid)
            _answer(self._process)  # it has imported
        return self._process

    def __enter__(self) -> "WarmRanks":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            # Its ranks ask the kernel to die with it (motley.launch.process.die_with_parent).
            self._process.kill()
            self._process.wait()


def keep_place(pid: int) -> None:
    """For a process that began a session: Linux gives each session a share of its own."""
    with contextlib.suppress(OSError):
        priority = os.getpriority(os.PRIO_PROCESS, pid)
        Path(f"/proc/{pid}/autogroup").write_text(f"{priority}\n")


def _answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the process that forks ranks ended: {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer
