"""Results of a long list of items, made in shards by processes that may die, merged in order.

    <folder>/
      about.json          what the shards are of; all processes here must agree on it
      shard.00012.csv     whole, or not there
      shard.00013.lease   some process works on it
      rank.3.json         the work of one rank, in its last job
      predictions.csv     all shards in order, once they are there

The processes share a folder and nothing else. A lease is a file that its owner touches now and
then, and that names the owner. One that was not touched for a while belongs to an owner that is
gone, and any process may take it; on the owner's own machine that is seen at once.
"""

import contextlib
import csv
import fcntl
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from motley.errors import MotleyError

_RENEW_S = 5.0
_PATIENCE_S = 1.0
GONE_S = 60.0  # NFS shows another machine's touch up to 30 s late


class Leases:
    """The leases of one process in a folder; use it as a context, in which they are renewed.

    Args:
        folder: that all share; it exists.
        gone_s: after so many seconds without a touch an owner is gone.
    """

    def __init__(self, folder: Path, gone_s: float = GONE_S) -> None:
        self._folder, self._gone_s, self._host = folder, gone_s, os.uname().nodename
        self._owner = f"{self._host}.{os.getpid()}"
        self._held: set[Path] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> "Leases":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for path in list(self._held):
            self._drop(path)

    def take(self, name: str) -> bool:
        """Take a lease, if nobody has it or its owner is gone."""
        path = self._folder / f"{name}.lease"
        with self._locked(path) as file:
            if file is not None:
                if not self._is_gone(file):
                    return False
                file.seek(0)
                file.write(self._owner + "\n")
                file.truncate()
                self._held.add(path)
                return True
        try:
            with path.open("x") as file:
                file.write(self._owner + "\n")
        except FileExistsError:
            return False
        self._held.add(path)
        return True

    def is_free(self, name: str) -> bool:
        """Nobody has it, or its owner is gone."""
        try:
            with (self._folder / f"{name}.lease").open() as file:
                return self._is_gone(file)
        except FileNotFoundError:
            return True

    def drop(self, name: str) -> None:
        """Give a lease back."""
        self._drop(self._folder / f"{name}.lease")

    def _drop(self, path: Path) -> None:
        self._held.discard(path)
        with self._locked(path) as file:
            if file is not None and self._owns(file):
                path.unlink()

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[TextIO | None]:
        """The lease's file, while nobody else judges or changes it; None if there is none.

        To see that an owner is gone and to take its lease must be one act: of two who saw the
        same, the second would take away the first's new one. So the same file changes hands,
        under the kernel's lock, which goes with whoever dies holding it (NFS has such locks too,
        and a run's folder needs them as well). Only who holds the lock of the very file that is
        under the name unlinks it, so it is still that one when it is written to.
        """
        try:
            file = path.open("r+")
        except FileNotFoundError:
            yield None
            return
        with file:
            yield file if self._lock(file) and _is_at(file, path) else None

    def _lock(self, file: TextIO) -> bool:
        """Wait for a lock that is held for a millisecond; not for ever: its owner may be frozen."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
            except OSError as error:
                raise MotleyError(
                    f"the disk of {self._folder} gives no locks ({error.strerror}); choose a "
                    "folder on another with --out"
                ) from None
            time.sleep(0.005)

    def _owns(self, file: TextIO) -> bool:
        file.seek(0)
        return file.read().strip() == self._owner

    def _is_gone(self, file: TextIO) -> bool:
        """By the clock of the disk: machines' clocks differ."""
        host, _, pid = file.read().strip().rpartition(".")
        if host == self._host and not Path("/proc", pid).exists():
            return True
        with tempfile.TemporaryFile(dir=self._folder) as new:
            now = os.fstat(new.fileno()).st_mtime
        return now - os.fstat(file.fileno()).st_mtime > self._gone_s

    def _renew(self) -> None:
        while not self._end.wait(min(_RENEW_S, self._gone_s / 4)):
            for path in list(self._held):
                # A network's disk that fails for a moment is asked again, as long as this lives.
                with contextlib.suppress(OSError, MotleyError), self._locked(path) as file:
                    if file is not None and self._owns(file):
                        os.utime(file.fileno())


def _is_at(file: TextIO, path: Path) -> bool:
    """An open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


MERGED = "predictions.csv"


class Shards:
    """A folder of shards.

    Args:
        items: how many there are in all. size: of a shard; the last may be smaller.
        columns: names of the fields of a row.
    """

    def __init__(self, folder: Path, items: int, size: int, columns: Sequence[str]) -> None:
        self.folder, self._items, self._size, self._columns = folder, items, size, columns
        self.count = -(-items // size)

    def open(self, about: Mapping[str, Any]) -> None:
        """Make the folder, or take it as it is; MotleyError if it is of something else."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {**about, "items": self._items, "shard": self._size}
        path = self.folder / "about.json"
        new = path.with_name(f".about.{os.uname().nodename}.{os.getpid()}")
        new.write_text(json.dumps(own, indent=1, sort_keys=True) + "\n")
        try:
            os.link(new, path)  # whole, and by one process alone
        except FileExistsError:
            pass
        finally:
            new.unlink()
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise MotleyError(
                f"{path} cannot be read ({error}); give another folder with --out"
            ) from None
        if differing := [key for key in own | found if own.get(key) != found.get(key)]:
            said = ", ".join(f"{key} {found.get(key)} (now: {own.get(key)})" for key in differing)
            raise MotleyError(
                f"{self.folder} holds predictions of something else: {said}; give another folder "
                "with --out, or the same options"
            )

    def name(self, number: int) -> str:
        """Of a shard, and of its lease."""
        return f"shard.{number:05d}"

    def items_of(self, number: int) -> range:
        """The items of a shard."""
        return range(self._size * number, min(self._size * (number + 1), self._items))

    def path(self, number: int) -> Path:
        """Of a shard."""
        return self.folder / f"{self.name(number)}.csv"

    def missing(self) -> list[int]:
        """Shards that are not there yet."""
        found = set(self.folder.glob("shard.*.csv"))
        return [n for n in range(self.count) if self.path(n) not in found]

    def write(self, number: int, rows: Iterable[Sequence[object]]) -> None:
        """Write a shard, whole or not at all."""
        self._write(self.path(number), rows)

    def merge(self) -> Path:
        """Put all shards into one file, in order; they must all be there."""
        rows: list[list[str]] = []
        for number in range(self.count):
            path = self.path(number)
            csv.field_size_limit(2**30)  # a prediction may well take more than the usual 128 KiB
            with path.open(newline="") as file:
                header, *shard = list(csv.reader(file)) or [[]]
            if header != [*self._columns]:
                raise MotleyError(
                    f"{path} has the columns {', '.join(header)}, and now they are "
                    f"{', '.join(self._columns)}; remove it, and run the same line again"
                )
            if len(shard) != len(self.items_of(number)):
                raise MotleyError(
                    f"{path} has {len(shard)} rows, not {len(self.items_of(number))}; remove it, "
                    "and run the same line again"
                )
            rows += shard
        merged = self.folder / MERGED
        self._write(merged, rows)
        return merged

    def _write(self, path: Path, rows: Iterable[Sequence[object]]) -> None:
        new = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        with new.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self._columns)
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
