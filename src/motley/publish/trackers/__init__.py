"""Trackers that a run is published to: a file here adds one by listing it under ``TRACKERS``.

Each is a subclass of :class:`Tracker`; ``--to`` and ``-h`` of plots/publish.py learn of
it from there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from motley.publish.series import Note, Parameter, Row
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder
from motley.registry import entries


@dataclass(frozen=True)
class Published:
    """The run.

    Attributes:
        folder: of its records, absolute.
        project: what the tracker groups runs by.
        started: seconds since the epoch; of a run that was resumed, when it was first published.
        parameters: what it was asked to do, and on what.
    """

    folder: RunFolder
    project: str
    started: float
    parameters: Mapping[str, Parameter]

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.path.name


class Tracker(ABC):
    """A run in a tracker, which is opened, given rows and notes in order, and closed.

    A subclass is listed under ``TRACKERS`` of its module, and imports its package when
    :meth:`check` or the constructor is called, not before.

    Attributes:
        name: of ``--to``. says: where it publishes to, for ``-h``.
        settles_s: seconds after which published rows are sure to last though this process be
            killed; None: when it is closed.
        anew: the tracker has nothing of the run yet, and everything is to be published.
        look: the command or address that shows the run.
    """

    name: ClassVar[str]
    says: ClassVar[str]
    settles_s: float | None = 0.0
    anew: bool
    look: str

    @classmethod
    @abstractmethod
    def check(cls) -> None:
        """Raise MotleyError if a package is missing."""

    @abstractmethod
    def __init__(self, run: Published, memory: JsonDict) -> None:
        """Go on with a run that was published before, or begin one.

        Args:
            run: the run.
            memory: result of :meth:`memory` when the position was saved last; empty: the run is
                new.
        """

    @abstractmethod
    def memory(self) -> JsonDict:
        """Return the state to go on from after the last rows, as JSON; also once it is closed."""

    @abstractmethod
    def publish(self, steps: Sequence[Row], samples: Sequence[Row], notes: Sequence[Note]) -> None:
        """Publish rows and notes.

        Args:
            steps: rows of steps and of evaluations.
            samples: rows of devices, at times of their own.
            notes: notes on events.
        """

    @abstractmethod
    def close(self, status: str) -> None:
        """End the run in the tracker.

        Args:
            status: of the run: running, finished, failed or stopped.
        """


def trackers() -> dict[str, type[Tracker]]:
    """Return all trackers by name."""
    kinds: list[type[Tracker]] = entries(__name__, "TRACKERS")
    return {kind.name: kind for kind in kinds}
