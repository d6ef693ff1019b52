"""The runs under a folder: copies of remote records, and a follower of each run.

Hosts with their own disk record a part of each run on that disk. This module copies these records
over one connection per host, and sends only new data, every few seconds. The copies are in a
temporary folder, which is removed when the program ends. The run's own folder is not changed.

New runs are found as they start.
"""

import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from motley.errors import HostTrouble
from motley.live.follow import MOST, RunFollower, hosts_elsewhere
from motley.live.snapshot import MOST_ROWS, Snapshot, take_snapshot
from motley.records.run_folder import RunFolder, find_runs
from motley.records.training import RankGroups

if TYPE_CHECKING:
    from motley.cluster.ssh import Remote

_EVERY_S, _LIMIT_S, _FIRST_S = 3.0, 15.0, 30.0

_PIECE = 32 * 2**20  # bytes of a file that are sent at once if the whole file is copied

# For each file the script prints a mark, the file's name, start and end of the bytes that follow,
# and the file's size. The first request for a long file returns its first line and its end. A file
# that is copied whole is sent in pieces.
_SCRIPT = r"""mark=$1; most=$2; piece=$3; cd "$4" || exit 3; shift 4
while [ $# -gt 1 ]; do
  if [ -f "$1" ]; then
    size=$(($(wc -c <"$1"))); start=$2
    [ "$start" -le "$size" ] || start=0
    end=$size
    [ "$piece" = 0 ] || [ $((start + piece)) -ge "$size" ] || end=$((start + piece))
    printf '%s %s %s %s %s\n' "$mark" "$1" "$start" "$end" "$size"
    if [ "$start" = 0 ] && [ "$end" -gt "$most" ] && [ "$piece" = 0 ]; then
      head -n 1 "$1"; tail -c +$((end - most + 1)) "$1" | head -c "$most" | sed 1d
    elif [ "$start" -lt "$end" ]; then
      tail -c +$((start + 1)) "$1" | head -c $((end - start))
    fi
    printf '\n'
  fi
  shift 2
done
"""


class Collector:
    """A context manager that keeps copies of remote records up to date.

    Args:
        asked: True: copy records. False: copy nothing. The value is also an attribute.
        whole: True: copy files completely. False: copy only the end of long files.
    """

    def __init__(self, asked: bool, whole: bool = False) -> None:
        self.asked, self._whole = asked, whole
        self._stop = threading.Event()
        self._threads: dict[tuple[Path, str], threading.Thread] = {}
        self._tried: dict[tuple[Path, str], threading.Event] = {}

    def __enter__(self) -> "Collector":
        if self.asked:
            self._folder = tempfile.TemporaryDirectory(prefix="motley-watch-")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads.values():
            thread.join(_EVERY_S)
        if self.asked:
            self._folder.cleanup()

    def copies(self, run: RunFolder) -> Sequence[RunFolder]:
        """Return a list with the folder for the copies of a run; empty if nothing is copied."""
        return [RunFolder(self._place(run))] if self.asked else []

    def _place(self, run: RunFolder) -> Path:
        return Path(self._folder.name) / "_".join(run.path.resolve().parts[1:])

    def start(self, followers: Iterable[RunFollower]) -> bool:
        """Start to copy files that are not on this host. Return True if a copy was started."""
        began = False
        for follower in followers if self.asked else ():
            for host in hosts_elsewhere(follower):
                key = self._place(follower.run), host
                if key not in self._threads:
                    thread = threading.Thread(
                        target=self._copy, args=(follower, host, key[0]), daemon=True
                    )
                    self._tried[key] = threading.Event()
                    self._threads[key] = thread
                    thread.start()
                    began = True
        return began

    def wait(self) -> None:
        """Wait until the first copies of all files are complete, or have failed."""
        deadline = time.monotonic() + _FIRST_S
        for tried in self._tried.values():
            tried.wait(max(0.0, deadline - time.monotonic()))

    def _copy(self, follower: RunFollower, host: str, place: Path) -> None:
        from motley.cluster.ssh import connect  # a slow import, which is seldom needed

        place.mkdir(parents=True, exist_ok=True)
        while not self._stop.is_set():
            try:
                with connect(host) as remote:
                    files = Copies(follower.run, follower.about, host, place, self._whole)
                    while not self._stop.is_set():
                        if files.update(remote):
                            continue
                        follower.troubles.pop(host, None)
                        self._tried[place, host].set()
                        self._stop.wait(_EVERY_S)
            except HostTrouble as trouble:
                follower.troubles[host] = f"{trouble.found}; {trouble.fix}"
                self._tried[place, host].set()
            self._stop.wait(_EVERY_S)


class Copies:
    """The copies of one host's files of a run.

    Args:
        run: folder of the run.
        about: content of run.json.
        host: host of the files.
        place: folder of the copies.
        whole: see :class:`Collector`.
    """

    def __init__(
        self, run: RunFolder, about: dict[str, object], host: str, place: Path, whole: bool = False
    ) -> None:
        self._folder, self._place = run.path.resolve(), place
        self._piece = _PIECE if whole else 0
        mine = RankGroups(about).list_ranks(host)
        paths = [*(run.step_file(rank) for rank in mine), run.gpu_file(host)]
        self._offsets = {path.name: 0 for path in paths}

    def update(self, remote: "Remote") -> bool:
        """Copy new records, up to a limit of bytes. Return True if more records are left to copy.

        Raises:
            HostTrouble: the host does not answer, or lacks the folder.
        """
        mark = secrets.token_hex(16)
        words = [word for pair in self._offsets.items() for word in pair]
        done = remote.run(_SCRIPT, mark, MOST, self._piece, self._folder, *words, limit=_LIMIT_S)
        if done.code == 3:
            raise HostTrouble(
                "no run folder", f"{remote.host} has no folder {self._folder}",
                "run this command in the folder from which mpirun was started",
            )  # fmt: skip
        more = False
        for piece in done.output.split(f"{mark} ")[1:]:
            head, _, text = piece.partition("\n")
            name, start, end, size = head.rsplit(" ", 3)
            if name in self._offsets:
                self._take(name, int(start), int(end), text)
                more |= int(end) < int(size)
        return more

    def _take(self, name: str, start: int, end: int, text: str) -> None:
        # The last line may be incomplete, and is then requested again.
        whole, newline, torn = text.removesuffix("\n").rpartition("\n")
        self._offsets[name] = end - len(torn.encode())
        path = self._place / name
        if not start:
            path.unlink(missing_ok=True)  # followers see a new file and restart
        with path.open("ab") as file:
            file.write((whole + newline).encode())


MOST_RUNS = 40  # newest runs, which are shown
_MOST_TAKEN = 200  # snapshots that are cached
_FIND_S = 5.0  # seconds between two searches
_LOOK_S = 1.0  # seconds between two reads of all records
GLANCE_S = 0.25  # seconds between two checks of the leading rank's steps


class Runs:
    """All runs at or under a folder.

    Args:
        folder: folder of one run, or of runs at any depth.
        copies: function of a run's folder that returns the folders with copies from other hosts.

    Attributes:
        hidden: number of older runs that are not shown.
        looks: number of times that :meth:`look` was called.
    """

    def __init__(
        self, folder: Path, copies: Callable[[RunFolder], Sequence[RunFolder]] = lambda run: ()
    ) -> None:
        self._folder, self._copies = folder, copies
        self._followers: dict[str, RunFollower] = {}
        self._taken: dict[tuple[str, int, int | None], tuple[int, Snapshot]] = {}
        self._next = self._due = float("-inf")
        self.hidden = self.looks = 0

    def look_if_due(self, clock: float, wall: float) -> bool:
        """Read new records once a second, and immediately if a rank has just become slower.

        Return True if records were read. Call this method every GLANCE_S seconds.
        """
        if clock < self._due and not any(
            follower.glance(clock, wall) for follower in self.running_followers()
        ):
            return False
        self._due = clock + _LOOK_S - GLANCE_S / 2  # so that the nearest call is due
        self.look(clock, wall)
        return True

    def look(self, clock: float, wall: float) -> None:
        """Read the new records of all runs; see :meth:`RunFollower.look`."""
        self.looks += 1
        if clock >= self._next:
            self._next = clock + _FIND_S
            self._find(clock, wall)
        for follower in self._followers.values():
            if follower.may_change(clock):
                follower.look(clock, wall)

    def _find(self, clock: float, wall: float) -> None:
        result = find_runs([self._folder])
        if not result and RunFolder(self._folder).record_files():
            result = [RunFolder(self._folder)]  # a run that is just starting
        newest = sorted(result, key=_changed, reverse=True)
        self.hidden = max(0, len(newest) - MOST_RUNS)
        saved = {}
        for run in newest[:MOST_RUNS]:
            name = run.path.relative_to(self._folder).as_posix()
            name = run.path.resolve().name if name == "." else name
            saved[name] = self._followers.get(name) or RunFollower(run, self._copies(run))
        self._followers = saved

    @property
    def names(self) -> list[str]:
        """Names of the runs, the newest first."""
        return list(self._followers)

    def running(self) -> list[str]:
        """Return the names of the runs that are running."""
        return [
            name for name, follower in self._followers.items()
            if follower.about.get("status") == "running"
        ]  # fmt: skip

    def running_followers(self) -> list[RunFollower]:
        """Return the followers of the runs that are running."""
        return [self._followers[name] for name in self.running()]

    def follower(self, name: str) -> RunFollower | None:
        """Return the follower of the run of this name; None if the run does not exist."""
        return self._followers.get(name)

    def snapshot(
        self, name: str, wall: float, most: int = MOST_ROWS, rank: int | None = None
    ) -> Snapshot | None:
        """Return the snapshot of a run; None if the run does not exist. See :func:`take_snapshot`.

        After each reading of the records, only the first call takes a snapshot. Later calls return
        the same snapshot.
        """
        follower = self._followers.get(name)
        if follower is None:
            return None
        looks, result = self._taken.get((name, most, rank), (-1, None))
        if result is None or looks != follower.looks:
            if len(self._taken) > _MOST_TAKEN:
                self._taken.clear()
            result = take_snapshot(follower, wall, most, rank)
            self._taken[name, most, rank] = follower.looks, result
        return result


def _changed(run: RunFolder) -> float:
    try:
        return run.run_file.stat().st_mtime
    except OSError:
        return 0.0
