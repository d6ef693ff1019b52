"""Jobs of several ranks that begin at once: see warm.zygote."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
FOLDERS = (TESTS, ROOT / "src", ROOT / "torch_dist", ROOT / "deepspeed")


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
        instead: a folder of packages that are taken in place of the environment's own.
    """

    def __init__(self, modules: Sequence[str], instead: Path | None = None) -> None:
        folders = (*FOLDERS, *([instead] if instead else []))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "warm.zygote", *modules],
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)),
                "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._ready = False

    def run(self, ranks: int, body: str, argument: Any, folder: Path, limit: float = 60.0) -> Ended:
        """Run ``body``, as in ``module:function``, on so many ranks, and wait for its end.

        Args:
            argument: given to each rank; of what JSON knows.
            folder: for the ranks' output; made if need be.
            limit: seconds, after which the ranks are killed.
        """
        if not self._ready:
            self._answer()
            self._ready = True
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*.txt"):
            old.unlink()
        job = {"ranks": ranks, "body": body, "argument": argument, "folder": str(folder),
               "limit": limit}  # fmt: skip
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._answer()
        texts = [folder / f"rank{rank}.txt" for rank in range(ranks)]
        output = "".join(text.read_text(errors="replace") for text in texts if text.exists())
        return Ended(tuple(answer["codes"]), answer["timed_out"], output)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks ranks ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> "WarmRanks":
        return self

    def __exit__(self, *_: object) -> None:
        # Its ranks ask the kernel to die with it (motley.launch.die_with_parent).
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
