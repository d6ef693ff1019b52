"""Where a run is published to: a file here adds a tracker by listing it under ``TRACKERS``.

It is a subclass of motley.publish.tracker.Tracker; ``--to`` and ``-h`` of plots/publish.py learn of
it from there.
"""

from motley.publish.tracker import Tracker
from motley.registry import entries


def trackers() -> dict[str, type[Tracker]]:
    """All of them, by name."""
    kinds: list[type[Tracker]] = entries(__name__, "TRACKERS")
    return {kind.name: kind for kind in kinds}
