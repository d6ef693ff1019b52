"""Follows all runs under a folder, or one; finds new ones as they come."""

from collections.abc import Callable, Sequence
from pathlib import Path

from motley.live.follow import RunFollower
from motley.live.snapshot import MOST_ROWS, Snapshot, take_snapshot
from motley.records.run_folder import RunFolder, find_runs

MOST_RUNS = 40  # that are shown, the newest
_MOST_TAKEN = 200  # snapshots that are kept
_FIND_S = 5.0  # seconds between two searches
_LOOK_S = 1.0  # between two looks
GLANCE_S = 0.25  # between two glances, and looks while some rank becomes slower


class Runs:
    """All runs at or under a folder.

    Args:
        folder: of runs, at any depth, or of one.
        copies: folders with what other hosts wrote for a run, by its folder.

    Attributes:
        hidden: how many older runs there are. looks: how many there were.
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
        """Look once a second, and at once where some rank has just become slower; is to be called
        each GLANCE_S. Whether it was."""
        if clock < self._due and not any(
            follower.glance(clock, wall) for follower in self.running_followers()
        ):
            return False
        self._due = clock + _LOOK_S - GLANCE_S / 2  # of the glances, the one that is next to it
        self.look(clock, wall)
        return True

    def look(self, clock: float, wall: float) -> None:
        """Read what is new; see :meth:`RunFollower.look`."""
        self.looks += 1
        if clock >= self._next:
            self._next = clock + _FIND_S
            self._find(clock, wall)
        for follower in self._followers.values():
            if follower.may_change(clock):
                follower.look(clock, wall)

    def _find(self, clock: float, wall: float) -> None:
        found = find_runs([self._folder])
        if not found and RunFolder(self._folder).record_files():
            found = [RunFolder(self._folder)]  # it is being made
        newest = sorted(found, key=_changed, reverse=True)
        self.hidden = max(0, len(newest) - MOST_RUNS)
        kept = {}
        for run in newest[:MOST_RUNS]:
            name = run.path.relative_to(self._folder).as_posix()
            name = run.path.resolve().name if name == "." else name
            kept[name] = self._followers.get(name) or RunFollower(run, self._copies(run))
        self._followers = kept

    @property
    def names(self) -> list[str]:
        """The newest first."""
        return list(self._followers)

    def running(self) -> list[str]:
        """Names of those that run."""
        return [
            name for name, follower in self._followers.items()
            if follower.about.get("status") == "running"
        ]  # fmt: skip

    def running_followers(self) -> list[RunFollower]:
        """Theirs."""
        return [self._followers[name] for name in self.running()]

    def follower(self, name: str) -> RunFollower | None:
        """Of a run; None of one that is not there."""
        return self._followers.get(name)

    def snapshot(
        self, name: str, wall: float, most: int = MOST_ROWS, rank: int | None = None
    ) -> Snapshot | None:
        """Of a run, see :func:`take_snapshot`; None of one that is not there. It is taken once a
        look, however many ask."""
        follower = self._followers.get(name)
        if follower is None:
            return None
        looks, found = self._taken.get((name, most, rank), (-1, None))
        if found is None or looks != follower.looks:
            if len(self._taken) > _MOST_TAKEN:
                self._taken.clear()
            found = take_snapshot(follower, wall, most, rank)
            self._taken[name, most, rank] = follower.looks, found
        return found


def _changed(run: RunFolder) -> float:
    try:
        return run.run_file.stat().st_mtime
    except OSError:
        return 0.0
