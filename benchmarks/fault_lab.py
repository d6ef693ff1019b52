"""Hosts of a lab in a box, where rows of the fault matrix are played."""

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from bench_lab import READY, BenchLab
from fault_job import Job, until
from fault_places import DDP, Place, is_cache
from result import ROOT, VENV

_MARKS = ("motley", "prte", "mpirun", "entry_cn", "ssh\0-o\0BatchMode", "setup/")
_UNDO = {"cut": "heal", "freeze": "thaw", "kill": "boot"}
# As the lab's user, whose files alone these are: a host's /tmp also holds the way to whatever
# every host sees at its own path, this repository too.
_FILES = 'find /tmp /dev/shm -mindepth 1 -maxdepth 1 -user "$(id -un)" '


class LabPlace(Place):
    """Hosts of a lab that is up.

    Args:
        folder: of this row. lab: see bench_lab. hosts: those that the row has.
    """

    def __init__(self, folder: Path, lab: BenchLab, hosts: Sequence[str]) -> None:
        super().__init__(folder)
        self.lab, self.hosts = lab, tuple(hosts)
        homes = Path("/var/lib/motley-lab", lab.name, "homes", "shared")
        self._home_here = next(homes.iterdir())
        self.home = f"/home/{self._home_here.name}"
        self.logs = self._home_here / "logs"
        self._uid = self._home_here.stat().st_uid
        self._harmed: dict[str, str] = {}
        self._was_off: set[str] = set()  # nobody could tidy up there
        self._undo: list[tuple[str, str]] = []
        self.begin()

    def begin(self) -> None:
        """No runs yet, and a hosts.txt with this row's hosts."""
        names = "".join(f"{host} slots=1\\n" for host in self.hosts)
        self.lab.on_head(f"printf '{names}' >~/hosts.txt; rm -rf ~/logs")

    def start(
        self, run: str, ranks: int, *words: object, script: object = DDP, keep: bool = False,
        train: bool = True, mpi: Sequence[str] = (), into: str = "", head: str = "",
        line: str = "--hostfile ~/hosts.txt", **extra: Any,
    ) -> Job:  # fmt: skip
        """As :meth:`Place.start`.

        Args:
            head: where it is typed; default: the first host. line: who takes part.
        """
        text = "bash setup/keep_training.sh " if keep else ""
        text += f"mpirun -np {ranks} {line} -x MOTLEY_VENV -x OMP_NUM_THREADS "
        text += " ".join([*mpi, *(f"-x {name}" for name in extra)])
        text += f" ./entry_cn.sh {script} {' '.join(map(str, words))} "
        if train:
            text += " ".join(map(str, self.options(run, ranks, words)))
        sets = "".join(f"export {name}={value}; " for name, value in extra.items())
        # A pipe of its own user's: what outlives mpirun opens it again, which root's would forbid.
        text = f"{READY} && {sets}{text} 2>&1 | {into or 'cat'}; exit ${{PIPESTATUS[0]}}"
        return self.on(head or self.hosts[0], text)

    def options(self, run: str, ranks: int, words: Sequence[object]) -> list[object]:
        """As :meth:`Place.options`, with the records in the hosts' home."""
        usual = super().options(run, ranks, words)
        return ["~/logs" if word == self.logs else word for word in usual]

    def on(self, host: str, script: str, *, root: bool = False) -> Job:
        """A bash script on a host, not waited for."""
        words = ["bash", "lab/lab.sh", "exec", *(["--root"] if root else []), host]
        words += ["--name", self.lab.name, "--", "bash", "-c", script]
        return self.keep(Job(words, {**os.environ, "MOTLEY_VENV": str(VENV)}, ROOT))

    def root(self, host: str, script: str, undo: str = "") -> str:
        """Run a script as root of a host; its output.

        Args:
            undo: a script for :meth:`restore`.
        """
        if undo:
            self._undo.append((host, undo))
        job = self.on(host, script, root=True)
        assert job.wait(20) == 0, job.output
        return job.output

    def other_file(self, host: str, path: Path, edit: str) -> None:
        """Let a host alone see another file in place of one that all share.

        Args:
            edit: a script for sed.
        """
        copy = f"/run/other.{path.name}"
        text = f"sed {quote(edit)} {path} >{copy} && chmod --reference={path} {copy}"
        self.root(host, f"{text} && mount --bind {copy} {path}", undo=f"umount {path}")

    def harm(self, what: str, host: str) -> float:
        """``cut``, ``freeze`` or ``kill``; when it was done, seconds since the epoch."""
        self._harmed[host] = _UNDO[what]
        self._was_off |= {host} if what == "kill" else set()
        self.lab.do(what, host, stdout=subprocess.PIPE)
        return time.time()

    def heal(self, host: str) -> None:
        """Undo the harm to a host."""
        self.lab.do(self._harmed.pop(host), host, stdout=subprocess.PIPE)

    def _ours(self, path: Path, command: str) -> bool:
        return path.stat().st_uid == self._uid and any(mark in command for mark in _MARKS)

    def host_of(self, pid: int) -> str:
        """The host that a process is on, as its kernel calls it."""
        uname = ["nsenter", "-t", str(pid), "-u", "uname", "-n"]
        return subprocess.run(uname, capture_output=True, text=True, check=False).stdout.strip()

    def remember_segments(self) -> None:
        """All of its user's in a host's /dev/shm is the row's own."""

    def files_left(self) -> list[str]:
        """In /tmp and /dev/shm of each host that was not switched off."""
        result = []
        for host in set(self.hosts) - self._was_off:
            job = self.on(host, _FILES + "-printf '%f\\n'")
            job.wait(10)
            result += [f"{host}: {name}" for name in job.output.split() if not self._cache(name)]
        return result

    def _cache(self, name: str) -> bool:
        return is_cache(name) or name == f"motley-{self._uid}"

    def left(self, limit_s: float = 12.0) -> list[str]:
        """As :meth:`Place.left`."""
        until(lambda: not self.processes(), limit_s)
        words = [" ".join(text.split()[:4]) for text in self.processes().values()]
        return [self.tidy(word) for word in words] + self.files_left()

    def first_process(self, host: str) -> int:
        """The one that a host's others come from."""
        script = f"/{self.lab.name}/hosts/{host}/init.sh".encode()
        own = Path("/proc/self/ns/mnt").readlink()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                there = script in (path / "cmdline").read_bytes()
                if there and (path / "ns" / "mnt").readlink() != own:
                    return int(path.name)
        raise AssertionError(f"{host} is off")

    def restore(self) -> list[str]:
        """Heal all hosts, and undo what was done as root; who had been off."""
        off = [host for host, undo in self._harmed.items() if undo == "boot"]
        for host in [*self._harmed]:
            self.heal(host)
        while self._undo:
            host, script = self._undo.pop()
            self.on(host, script, root=True).wait(20)
        return off

    def end(self) -> None:
        """As :meth:`Place.end`; and the user's temporary files on the hosts."""
        super().end()
        for host in self.hosts:
            self.on(host, _FILES + "-exec rm -rf {} +").wait(10)

    def tidy(self, text: str) -> str:
        """As :meth:`Place.tidy`, with ``~`` for the hosts' home."""
        return super().tidy(text.replace(self.home, "~"))
