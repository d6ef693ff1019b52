"""The tracker Trackio, which stores a run in a folder, a Hugging Face Space, or on a server.

Trackio's own environment variables name the Space or the server.
"""

import contextlib
import io
import os
import secrets
from collections.abc import Sequence
from typing import Any

from motley.publish.series import Note, Row
from motley.publish.trackers import Published, Tracker
from motley.records.json_files import JsonDict
from motley.registry import import_extra

_SENT_S = 5.0  # Trackio's thread writes twice per second
_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_BAD = ("fault", "lost", "left_out")  # kinds of events that are warnings


class Trackio(Tracker):
    """A run in Trackio. Events become alerts of the run.

    Trackio accepts no time for a number. A sample of a device is therefore published at the step in
    which it was taken, with ``seconds`` since the start of the run.
    """

    name, says = "trackio", "Trackio: as TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says, or locally"
    settles_s = _SENT_S

    @classmethod
    def check(cls) -> None:
        """Raise MotleyError if a package for Trackio is missing."""
        if not any(map(os.environ.get, _ELSEWHERE)):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it would ask the hub for the user
        _module()

    def __init__(self, run: Published, memory: JsonDict) -> None:
        """Open the run in Trackio; see :meth:`Tracker.__init__`."""
        trackio = _module()
        place = next(filter(None, map(os.environ.get, _ELSEWHERE)), str(trackio.utils.TRACKIO_DIR))
        self._to = {"place": place, "project": run.project}
        self.anew = any(memory.get(name) != value for name, value in self._to.items())
        # Trackio identifies a run by its name.
        unique = f"{run.name}-{secrets.token_hex(2)}"
        self._name = unique if self.anew else str(memory["run"])
        self._level, self._finish = trackio.AlertLevel, trackio.finish
        self._started, self._last = run.started, 0
        with contextlib.redirect_stdout(io.StringIO()):
            self._run: Any = trackio.init(
                run.project, name=self._name, resume="never" if self.anew else "allow",
                config=dict(run.parameters), auto_log_gpu=False, auto_log_cpu=False, embed=False,
            )  # fmt: skip
        self.look = f"trackio show --project {run.project}"

    def memory(self) -> JsonDict:
        """Return the state with which a later process continues; see Tracker."""
        return {**self._to, "run": self._name}

    def publish(self, steps: Sequence[Row], samples: Sequence[Row], notes: Sequence[Note]) -> None:
        """Send rows and notes to Trackio; see :meth:`Tracker.publish`."""
        for row in (*steps, *samples):
            self._last = max(self._last, row.step or 0)
            step = self._last if row.step is None else row.step
            self._run.log({**row.values, "seconds": row.time - self._started}, step=step)
        for note in notes:
            level = self._level.WARN if note.kind in _BAD else self._level.INFO
            with contextlib.redirect_stdout(io.StringIO()):
                step = self._last if note.step is None else note.step
                self._run.alert(note.kind, note.text, level=level, step=step)

    def close(self, status: str) -> None:
        """End the run in Trackio; see :meth:`Tracker.close`."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._finish()  # not the run's own finish(), after which Trackio finishes it again


def _module() -> Any:
    return import_extra("trackio", "--to trackio", where="")


TRACKERS = (Trackio,)
