"""Where rows of the fault matrix are played: this machine; fault_lab.py has hosts of a lab."""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fault_job import Job, until
from result import ROOT, VENV

DDP = "torch_dist/train_vit.py"
# Small, and the same losses by any ranks: to 2e-6.
TRAIN = ("--epochs", 90, "--batch-size", 48, "--micro-batch", 16, "--precision", "fp32",
         "--eval-samples", 60, "--seed", 4)  # fmt: skip
SHARES = {1: "1", 2: "2,1", 3: "2,1,1", 4: "2,1,1,1", 5: "2,1,1,1,1"}
_RANK = "OMPI_COMM_WORLD_RANK"
_SEGMENT = re.compile(r"(/dev/shm/[\w.-]+)")
_CACHES = ("motley-0", "torchinductor", "pymp-", "tmp")


class Place:
    """This machine.

    Args:
        folder: of one row alone; is made.

    Attributes:
        mark: in the environment of whatever it starts.
        hosts: that ranks are on, in order. logs: the runs' records.
    """

    hosts: tuple[str, ...] = (os.uname().nodename,)

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, f"{folder.name}-{os.getpid()}"
        self.logs, self.temporary = folder / "logs", folder / "t"
        self.temporary.mkdir(parents=True)
        self.jobs: list[Job] = []
        self._segments: set[str] = set()

    @property
    def environ(self) -> dict[str, str]:
        """Of all that is started here."""
        path = f"{VENV / 'bin'}:{os.environ['PATH']}"
        return {
            **os.environ, "MOTLEY_VENV": str(VENV), "TMPDIR": str(self.temporary), "PATH": path,
            "OMP_NUM_THREADS": "1", "MOTLEY_FAULTS": self.mark,
        }  # fmt: skip

    def start(
        self, run: str, ranks: int, *words: object, script: object = DDP, keep: bool = False,
        train: bool = True, mpi: Sequence[str] = (), into: str = "", **extra: Any,
    ) -> Job:  # fmt: skip
        """An mpirun line.

        Args:
            run: name of its folder. words: of the script.
            keep: under setup/keep_training.sh. train: the script trains, with TRAIN's options.
            into: what reads its output first. extra: its environment.
        """
        line = ["bash", "setup/keep_training.sh"] if keep else []
        line += ["mpirun", "-np", str(ranks), "--hostfile", "hosts.txt", *mpi, "./entry_cn.sh"]
        line += [str(script), *map(str, words)]
        if train:
            line += map(str, self.options(run, ranks, words))
        return self.keep(Job(line, {**self.environ, **extra}, ROOT, into))

    def options(self, run: str, ranks: int, words: Sequence[object]) -> list[object]:
        """Of a training, unless ``words`` have them."""
        usual = [*TRAIN, "--shares", SHARES[ranks], "--logs", self.logs, "--run", run]
        pairs = zip(usual[::2], usual[1::2], strict=True)
        return [word for pair in pairs if pair[0] not in words for word in pair]

    def command(self, *words: object, **extra: str) -> Job:
        """A command in the repository's folder."""
        return self.keep(Job([*map(str, words)], {**self.environ, **extra}, ROOT))

    def keep(self, job: Job) -> Job:
        """End it with the row, if it is still there."""
        self.jobs.append(job)
        return job

    def processes(self, *marks: str) -> dict[int, str]:
        """Those of this row with one of ``marks`` in their command line, and the command lines."""
        result = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (path / "cmdline").read_bytes().decode(errors="replace")
                zombie = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not zombie and command and self._ours(path, command):
                    words = command.replace("\0", " ").strip()
                    if not marks or any(mark in words for mark in marks):
                        result[int(path.name)] = words
        return result

    def _ours(self, path: Path, command: str) -> bool:
        return f"MOTLEY_FAULTS={self.mark}".encode() in (path / "environ").read_bytes()

    def named(self, *names: str) -> list[int]:
        """Processes of this row by their program's name."""
        result = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() in names:
                    result.append(pid)
        return result

    def ranks(self) -> dict[int, int]:
        """Process of each rank that runs, by its number."""
        result: dict[int, int] = {}
        for pid in self.processes("-m motley.launch "):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                pairs = dict(word.partition("=")[::2] for word in environ.split("\0"))
                if pairs.get(_RANK, "").isdigit():
                    result.setdefault(int(pairs[_RANK]), pid)
        return result

    def remember_segments(self) -> None:
        """Which files in /dev/shm the ranks have now."""
        for pid in self.ranks().values():
            with contextlib.suppress(OSError):
                self._segments |= {*_SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text())}

    def files_left(self) -> list[str]:
        """In temporary folders; caches that are kept on purpose are not counted."""
        shared = [name for name in self._segments if Path(name).exists()]
        names = (path.name for path in self.temporary.iterdir())
        return shared + [name for name in names if not is_cache(name)]

    def left(self, limit_s: float = 12.0) -> list[str]:
        """Processes and files that do not go away by themselves, in short."""
        until(lambda: not self.processes() and not self.files_left(), limit_s)
        words = [" ".join(text.split()[:4]) for text in self.processes().values()]
        return [self.tidy(word) for word in words] + self.files_left()

    def restore(self) -> list[str]:
        """Undo what was done to the hosts; those that had been off. Here there is nothing."""
        return []

    def end(self) -> None:
        """End all that a row has left."""
        self.restore()
        for job in self.jobs:
            if job.process.poll() is None:
                job.kill()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.processes(), 5)

    def tidy(self, text: str) -> str:
        """A line without this machine's paths."""
        for path, name in ((self.folder, "FOLDER"), (VENV, ".venv"), (ROOT, ".")):
            text = text.replace(str(path), name)
        return text


def is_cache(name: str) -> bool:
    """Whether a name in /tmp is of what is kept on purpose: motley's own caches, torch's."""
    return name.startswith(_CACHES) or name == f"motley-{os.getuid()}"


@contextmanager
def machine(folder: Path) -> Iterator[Place]:
    """This machine, for one row."""
    place = Place(folder)
    try:
        yield place
    finally:
        place.end()
        shutil.rmtree(folder, ignore_errors=True)
