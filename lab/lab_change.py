"""The one door for changes: each is done, or with ``--dry-run`` only printed."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from motley.errors import MotleyError

LIMIT_S = 60.0  # for one change of the system


class Changes:
    """Does changes to this machine, or prints them.

    Args:
        dry_run: print alone.
    """

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self._lock: tuple[int, ...] = ()

    def _says(self, what: str) -> bool:
        if self.dry_run:
            print(f"would {what}")
        return self.dry_run

    def run(self, *words: object, stdin: str = "") -> None:
        """Run a program; MotleyError with its last line if it fails."""
        command = [str(word) for word in words]
        given = f" <<< {shlex.quote(stdin)}" if stdin else ""
        if self._says(f"run: {shlex.join(command)}{given}"):
            return
        done = subprocess.run(
            command, input=stdin, text=True, capture_output=True, check=False,
            pass_fds=self._lock, timeout=LIMIT_S,
        )  # fmt: skip
        if done.returncode:
            text = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
            raise MotleyError(
                f"{shlex.join(command)} failed with status {done.returncode}: {text[-1]}"
            )

    def start(
        self, command: Sequence[str], marks: Mapping[str, str], log: Path
    ) -> "subprocess.Popen[str] | None":
        """Start a program that stays, its errors in ``log``; its output can be read."""
        if self._says(f"start: {shlex.join(command)}"):
            return None
        with log.open("w") as errors:
            return subprocess.Popen(
                list(command), env={**os.environ, **marks}, cwd="/", text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip

    def write(self, path: Path, text: str, mode: int = 0o644, owner: int = 0) -> None:
        """Write a whole file."""
        if self._says(f"write {path}:\n    " + text.rstrip("\n").replace("\n", "\n    ")):
            return
        path.unlink(missing_ok=True)
        path.touch(mode=mode)
        os.chown(path, owner, owner)
        path.write_text(text)

    def put(self, path: Path, value: str) -> None:
        """Write one value into a file of the kernel's."""
        if not self._says(f"write {value} to {path}"):
            try:
                path.write_text(value)
            except OSError as error:
                raise MotleyError(f"{value} cannot be written to {path}: {error}") from None

    def folder(self, path: Path, mode: int = 0o755, owner: int = 0) -> None:
        """Make a folder and those above it."""
        if not self._says(f"make folder {path}, mode {mode:o}, owner {owner}"):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(mode)  # mkdir's mode passes through the umask
            os.chown(path, owner, owner)

    def remove(self, path: Path) -> None:
        """Remove a folder and all in it."""
        if not self._says(f"remove {path}"):
            shutil.rmtree(path)

    def remove_cgroup(self, path: Path) -> None:
        """Remove a cgroup once the kernel has let go of its last process."""
        if self._says(f"remove cgroup {path}"):
            return
        deadline = time.monotonic() + 5
        while path.exists():
            try:
                path.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise MotleyError(f"the cgroup {path} cannot be removed: {error}") from None
                time.sleep(0.02)

    def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL to each."""
        for pid in pids:
            if not self._says(f"kill process {pid}"):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def await_end(self, pids: Sequence[int], limit: float = 5) -> None:
        """Wait until processes are gone; MotleyError after ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while not self.dry_run and (remaining := [pid for pid in pids if _lives(pid)]):
            if time.monotonic() > deadline:
                raise MotleyError(
                    f"processes {remaining} do not end; see what they are with: ps -fp "
                    f"{remaining[0]}"
                )
            time.sleep(0.01)

    @contextmanager
    def alone(self, lab: str, limit: float = 15) -> Iterator[None]:
        """Hold the lab's lock; wait up to ``limit`` seconds for another lab.sh to let go.

        Programs that were started by ``run`` hold it too, so what a killed lab.sh had begun
        has ended when the next one starts. An abstract socket leaves no file behind.
        """
        if self.dry_run:
            yield
            return
        deadline = time.monotonic() + limit
        with socket.socket(socket.AF_UNIX) as holder:
            while True:
                try:
                    holder.bind(f"\0motley-lab-{lab}")
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise MotleyError(
                            f"another lab.sh has worked on lab {lab} for {limit:.0f} s; wait "
                            "until it ends, or end it, and run this command again"
                        ) from None
                    time.sleep(0.05)
            self._lock = (holder.fileno(),)
            try:
                yield
            finally:
                self._lock = ()


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # A zombie only waits for its parent to look.
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
