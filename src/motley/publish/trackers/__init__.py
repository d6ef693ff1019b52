"""Experiment trackers. A module in this package adds trackers by a list ``TRACKERS``.

Each tracker is a subclass of :class:`Tracker`. The option ``--to`` of plots/publish.py offers all
trackers in these lists.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from motley.publish.series import Note, Parameter, Row
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder
from motley.registry import entries, is_subclass


@dataclass(frozen=True)
class Published:
    """A run that is published to a tracker.

    Attributes:
        folder: absolute path of the folder of the run's records.
        project: name by which the tracker groups runs.
        started: start of the run, seconds since 1970. For a resumed run, the start of the
            launch that was published first.
        parameters: options, versions, hosts and plan of the run.
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
    """A run in an experiment tracker, to which rows and notes are published in order.

    A subclass is listed under ``TRACKERS`` of its module, and imports its package only when
    :meth:`check` or the constructor is called.

    Attributes:
        name: value of ``--to``.
        says: description of the destination of the records, for ``-h``.
        settles_s: seconds after which published rows are safe even if this process is killed; None:
            rows are safe only after :meth:`close`.
        anew: True if the tracker has no records of the run yet. All records are then published.
        look: the command or address with which a user sees the run.
    """

    name: ClassVar[str]
    says: ClassVar[str]
    settles_s: float | None = 0.0
    anew: bool
    look: str

    @classmethod
    @abstractmethod
    def check(cls) -> None:
        """Raise MotleyError if the tracker's Python package is missing."""

    @abstractmethod
    def __init__(self, run: Published, memory: JsonDict) -> None:
        """Continue with a run that was published before, or start a new one.

        Args:
            run: the run.
            memory: result of :meth:`memory` when the position was last saved; empty if the run is
                new.
        """

    @abstractmethod
    def memory(self) -> JsonDict:
        """Return the state, as JSON, with which a later process continues after the last rows.

        The method also works after :meth:`close`.
        """

    @abstractmethod
    def publish(self, steps: Sequence[Row], samples: Sequence[Row], notes: Sequence[Note]) -> None:
        """Publish rows and notes to the tracker.

        Args:
            steps: rows of steps and of evaluations.
            samples: rows of the GPU log, such as load and memory, each with its own time.
            notes: notes on events.
        """

    @abstractmethod
    def close(self, status: str) -> None:
        """End the run in the tracker.

        Args:
            status: status of the run: running, finished, failed or stopped.
        """


def trackers() -> dict[str, type[Tracker]]:
    """Return all trackers by name."""
    kinds: list[type[Tracker]] = entries(
        __name__, "TRACKERS", partial(is_subclass, kind=Tracker), "subclasses of Tracker", "trackio"
    )
    return {kind.name: kind for kind in kinds}
