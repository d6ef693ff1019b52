"""plots/watch.py --serve, and what it tells a browser."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from project import ROOT


@contextmanager
def served(folder: Path, where: str = "127.0.0.1:0") -> Iterator[str]:
    """The address that it prints."""
    job = subprocess.Popen(
        [sys.executable, "plots/watch.py", str(folder), "--serve", where], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert job.stdout is not None
    try:
        yield job.stdout.readline().strip()
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=10)
        assert (job.returncode, errors) == (0, "")
    finally:
        job.kill()
        job.wait()


class Headlines:
    """What a page shows of who is waited for, as its events come; a context manager.

    Attributes:
        last: the last one.
    """

    def __init__(self, address: str, run: str) -> None:
        self.last = ""
        place = urlsplit(address)
        self._line = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
        self._line.request("GET", f"/live?run={run}")
        self._answer = self._line.getresponse()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "Headlines":
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def _read(self) -> None:
        for line in self._answer:
            if line.startswith(b"data: "):
                self.last = json.loads(line.removeprefix(b"data: "))["run"]["headline"]
