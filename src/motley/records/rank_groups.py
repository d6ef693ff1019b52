"""The groups of ranks that trained a run one after another, as ``groups`` of run.json lists them.

A group ends when a rank is lost, and with its job. A rank keeps its number within a job, but a
resumed run may have another host for it: the host of a record is found by its step.

    "groups": [{"step": 0, "ranks": [{"rank": 0, "host": "a", ...}, {"rank": 1, "host": "b", ...}]},
               {"step": 57, "ranks": [{"rank": 1, "host": "b", ...}]}]
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from motley.records.json_files import JsonDict

_TOLD = ("rank", "host", "device", "uuid", "precision")  # of a rank


def read_workers(ranks: Any) -> list[JsonDict]:
    """Return the entries of run.json's ``ranks``, without those that are damaged."""
    return [
        each for each in (ranks if isinstance(ranks, list) else [])
        if isinstance(each, dict) and isinstance(each.get("rank"), int)
    ]  # fmt: skip


def read_groups(about: Mapping[str, Any]) -> list[JsonDict]:
    """Return the groups of run.json, the first one first; of an older run.json, the one it tells.

    Each has ``step``, the steps that were taken before it began, and ``ranks``.
    """
    found = about.get("groups")
    groups = [
        {"step": each["step"], "ranks": read_workers(each.get("ranks"))}
        for each in (found if isinstance(found, list) else [])
        if isinstance(each, dict) and isinstance(each.get("step"), int)
    ]  # fmt: skip
    workers = read_workers(about.get("ranks"))
    return groups or ([{"step": 0, "ranks": workers}] if workers else [])


def add_group(
    groups: Sequence[JsonDict], step: int, workers: Sequence[Mapping[str, Any]]
) -> list[JsonDict]:
    """Return the groups with another one, which trains from ``step`` on.

    Records of later steps are dropped when a run is continued, and so are their groups.
    """
    told = [{name: worker.get(name) for name in _TOLD} for worker in workers]
    return [
        *(group for group in groups if group["step"] < step),
        {"step": step, "ranks": told},
    ]


class RankGroups:
    """The groups of one run.json.

    Attributes:
        groups: see :func:`read_groups`.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.groups = read_groups(about)
        self._known: dict[int, tuple[list[int], list[JsonDict]]] = {}
        for group in self.groups:
            for worker in group["ranks"]:
                steps, workers = self._known.setdefault(worker["rank"], ([], []))
                steps.append(group["step"])
                workers.append(worker)

    def worker(self, rank: int, step: int | None = None) -> JsonDict:
        """Return what is known of the rank that took a step (None: the last one that it took);
        empty if nothing."""
        steps, workers = self._known.get(rank, ([], []))
        if not workers:
            return {}
        return workers[-1 if step is None else max(0, bisect_right(steps, step) - 1)]

    def ranks_of(self, host: str) -> list[int]:
        """Return all ranks that ever trained on a host, ascending."""
        told = ((rank, each) for rank, (_, workers) in self._known.items() for each in workers)
        return sorted({rank for rank, worker in told if str(worker.get("host")) == host})

    @property
    def hosts(self) -> list[str]:
        """Names of all hosts that ever trained."""
        workers = (worker for group in self.groups for worker in group["ranks"])
        return list(dict.fromkeys(str(each["host"]) for each in workers if each.get("host")))
