"""A publisher that sends each record of a run once to an experiment tracker.

The publisher saves its position in the records beside them:

    published.<tracker>.json: {"started": 1763693554.1, "position": {...}, "tracker": {...}}

A position is saved once the tracker has all records before this position. After a kill, the
publisher therefore loses no record, but may send some records twice. Each tracker class describes
its handling of repeated records.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from motley.errors import MotleyError
from motley.live.follow import LAST_WORDS_S, RunFollower
from motley.live.words import plain
from motley.publish.series import (
    NewRecords,
    Position,
    RunReader,
    evaluation_rows,
    notes,
    parameters,
    sample_rows,
    step_rows,
)
from motley.publish.trackers import Published, Tracker
from motley.records.json_files import JsonDict, read_json, write_json
from motley.records.run_folder import RunFolder, take_folder

_LOOK_S = 1.0  # seconds between two readings of a running run
_SAVE_S = 5.0  # seconds between two saved positions


@dataclass(frozen=True)
class PublishedCounts:
    """The counts of records that a publisher has published.

    Attributes:
        status: status of the run; empty if the run has no run.json yet.
        steps: number of steps.
        evaluations: number of evaluations.
        samples: number of samples of devices.
        events: number of events.
    """

    status: str
    steps: int
    evaluations: int
    samples: int
    events: int


class Publisher:
    """A publisher of one run. The context manager locks the run's folder for one tracker.

    Args:
        run: folder of the run.
        kind: class of the tracker.
        project: name by which the tracker groups runs.
        copies: folders with copies of other hosts' records; see :class:`RunFollower`.

    Attributes:
        follower: reader of the run's state.
        stop: event that another thread sets to end publishing. The event is checked between two
            readings.

    Raises:
        MotleyError: another process publishes the run to this tracker, a file cannot be read or
            written, or the tracker reports an error.
    """

    def __init__(
        self, run: RunFolder, kind: type[Tracker], project: str, copies: Sequence[RunFolder] = ()
    ) -> None:
        self._run, self._kind, self._project = RunFolder(run.path.resolve()), kind, project
        self.follower = RunFollower(run, copies)
        self.stop = threading.Event()
        self._copies = copies
        self._unsaved: deque[tuple[float, JsonDict]] = deque()
        self._saved_at = float("-inf")
        self._counts = [0, 0, 0, 0]
        self._position = Position()
        self._reader = RunReader(run)
        self._tracker: Tracker | None = None

    def __enter__(self) -> "Publisher":
        name = self._kind.name
        try:
            self._lock = take_folder(
                self._run.path,
                    f"{self._run.path} is being published to {name}",
                "end that process first", f".published.{name}.lock",
            )  # fmt: skip
        except OSError as error:
            raise MotleyError(
                f"cannot write to {self._run.path}: {error.strerror}. Publishing writes its "
                "position to that folder; copy the folder to a place that you can write to"
            ) from None
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        try:
            if failed is None:
                self._close()
            elif self._tracker is not None:  # keep the saved position: some records were not sent
                with contextlib.suppress(MotleyError):
                    self._call(self._tracker.close, "running")
        finally:
            self._lock.close()

    # -- following

    def publish(
        self, follow: bool, each_look: Callable[[], bool] = lambda: False
    ) -> PublishedCounts:
        """Publish the present records, and return their counts.

        Args:
            follow: True: publish later records too, until the run ends.
            each_look: function that is called after each reading of the records. If it returns
                True, the next reading follows at once.
        """
        ended_at = None
        while True:
            clock = time.monotonic()
            self.follower.look(clock, time.time())
            if self.follower.problem:
                raise MotleyError(self.follower.problem)
            more = self._look(clock)
            more |= each_look()
            ended_at = (ended_at or clock) if self._has_ended() else None
            over = ended_at is not None and clock - ended_at >= LAST_WORDS_S
            if self.stop.is_set() or (not more and (not follow or over or self._is_old())):
                return PublishedCounts(str(self.follower.about.get("status", "")), *self._counts)
            if not more:
                self.stop.wait(_LOOK_S)

    def left_out(self) -> list[str]:
        """Return a line for each GPU log with rows that are not published, and the reason."""
        return [*self.follower.unread.values(), *self._reader.left_out()]

    def _has_ended(self) -> bool:
        return self.follower.about.get("status") not in (None, "running")

    def _is_old(self) -> bool:
        """Return True if the run ended so long ago that no process still writes its records."""
        ended = self.follower.about.get("ended")
        known = self._has_ended() and isinstance(ended, int | float)
        return known and time.time() - float(ended or 0) > LAST_WORDS_S

    def _look(self, clock: float) -> bool:
        """Publish new records; return True if further records are available already."""
        if not self.follower.about:
            return False  # run.json is not written yet
        if self._tracker is None:
            self._open()
        known = max(self._position.steps.values(), default=-1)
        new = self._reader.look(clock, time.time())
        if new:
            self._publish_new(new, known)
            self._position = new.position
        self._save(clock)
        return new.more

    def _publish_new(self, new: NewRecords, known: int) -> None:
        steps = step_rows(self.follower.about, new, known)
        evaluations, samples = evaluation_rows(new), sample_rows(new)
        new_notes = notes(new, time.time())
        assert self._tracker is not None
        self._call(self._tracker.publish, [*steps, *evaluations], samples, new_notes)
        counts = len(steps), len(evaluations), len(samples), len(new_notes)
        self._counts = [sum(pair) for pair in zip(self._counts, counts, strict=True)]

    # -- the saved position

    def _open(self) -> None:
        saved = self._read()
        about = self.follower.about
        began = about.get("started")
        usual = float(began) if isinstance(began, int | float) else time.time()
        run = Published(
            self._run, self._project, float(saved["started"] or usual), parameters(about)
        )
        before = saved["tracker"].get("project", self._project)
        if before != self._project:
            raise MotleyError(
                f"{self._run.path} was published to the project {before} of {self._kind.name}; "
                "name that project with --project, or remove "
                f"{self._run.published_file(self._kind.name)} to publish the whole run again"
            )
        tracker = self._call(self._kind, run, saved["tracker"])
        self._position = Position() if tracker.anew else saved["position"]
        self._reader = RunReader(self.follower.run, self._copies, self._position)
        self._started, self._tracker = run.started, tracker
        self._write(self._state())

    def _read(self) -> JsonDict:
        path = self._run.published_file(self._kind.name)
        try:
            memory = read_json(path)
            return {
                "started": float(memory["started"]), "tracker": {**memory["tracker"]},
                "position": Position.from_json(memory["position"]),
            }  # fmt: skip
        except FileNotFoundError:
            return {"started": None, "tracker": {}, "position": Position()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise MotleyError(
                f"{path} is damaged; remove it, and the whole run is published again"
            ) from None

    def _save(self, clock: float) -> None:
        """Save the last position before which the tracker certainly has all records."""
        assert self._tracker is not None
        settles = self._tracker.settles_s
        if settles is None or clock - self._saved_at < _SAVE_S:
            return
        self._saved_at = clock
        self._unsaved.append((clock + settles, self._state()))
        settled = [state for due, state in self._unsaved if due <= clock]
        if settled:
            self._write(settled[-1])
            self._unsaved = deque(list(self._unsaved)[len(settled) :])

    def _state(self) -> JsonDict:
        assert self._tracker is not None
        return {
            "started": self._started, "position": self._position.as_json(),
            "tracker": self._call(self._tracker.memory),
        }  # fmt: skip

    def _write(self, state: JsonDict) -> None:
        path = self._run.published_file(self._kind.name)
        try:
            write_json(path, state)
        except OSError as error:
            raise MotleyError(f"cannot write {path}: {error.strerror}") from None

    def _close(self) -> None:
        if self._tracker is not None:
            self._call(self._tracker.close, str(self.follower.about.get("status")))
            self._write(self._state())

    @property
    def look(self) -> str:
        """Command or web address that shows the run; empty before anything is published."""
        return self._tracker.look if self._tracker else ""

    def _call(self, what: Callable[..., Any], *words: Any) -> Any:
        """Call a function of the tracker. Convert its errors to a MotleyError."""
        try:
            return what(*words)
        except MotleyError:
            raise
        except Exception as error:
            text = plain(error) or type(error).__name__
            raise MotleyError(
                f"{self._kind.name}: {text}. Run this command again to publish the rest"
            ) from error
