"""Records of training: steps, evaluations, and groups of ranks. All functions are pure.

A group is a set of ranks that trained together. The field ``groups`` of run.json lists the groups
of a run in order.

A group ends when a rank is lost, or when the job ends. A rank keeps its number within a job. In a
resumed run the number may belong to another host, so the host of a record depends on the step.

    "groups": [{"step": 0, "ranks": [{"rank": 0, "host": "a", ...}, {"rank": 1, "host": "b", ...}]},
               {"step": 57, "ranks": [{"rank": 1, "host": "b", ...}]}]
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from motley.records.json_files import JsonDict

_TOLD = ("rank", "host", "device", "uuid", "precision")  # recorded fields of a rank


def read_workers(ranks: Any) -> list[JsonDict]:
    """Return the entries of the field ``ranks`` of run.json, without damaged entries."""
    return [
        each for each in (ranks if isinstance(ranks, list) else [])
        if isinstance(each, dict) and isinstance(each.get("rank"), int)
    ]  # fmt: skip


def read_groups(about: Mapping[str, Any]) -> list[JsonDict]:
    """Return the groups in run.json, in order. An older run.json has a single group.

    Each group has ``step``, the number of steps taken before it started, and ``ranks``.
    """
    result = about.get("groups")
    groups = [
        {"step": each["step"], "ranks": read_workers(each.get("ranks"))}
        for each in (result if isinstance(result, list) else [])
        if isinstance(each, dict) and isinstance(each.get("step"), int)
    ]  # fmt: skip
    workers = read_workers(about.get("ranks"))
    return groups or ([{"step": 0, "ranks": workers}] if workers else [])


def add_group(
    groups: Sequence[JsonDict], step: int, workers: Sequence[Mapping[str, Any]]
) -> list[JsonDict]:
    """Return the groups with a further group, which trains from ``step`` on.

    Groups that started at ``step`` or later are dropped, because the run repeats their steps.
    """
    facts = [{name: worker.get(name) for name in _TOLD} for worker in workers]
    return [
        *(group for group in groups if group["step"] < step),
        {"step": step, "ranks": facts},
    ]


class RankGroups:
    """The groups of ranks in one run.json.

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
        """Return the entry of the rank that had this number at a step; empty if there is none.

        Args:
            rank: number of the rank.
            step: number of the step. None: the last step of the rank.
        """
        steps, workers = self._known.get(rank, ([], []))
        if not workers:
            return {}
        return workers[-1 if step is None else max(0, bisect_right(steps, step) - 1)]

    def list_ranks(self, host: str) -> list[int]:
        """Return all ranks that ever trained on a host, ascending."""
        pairs = ((rank, each) for rank, (_, workers) in self._known.items() for each in workers)
        return sorted({rank for rank, worker in pairs if str(worker.get("host")) == host})

    @property
    def hosts(self) -> list[str]:
        """Names of all hosts that ever trained."""
        workers = (worker for group in self.groups for worker in group["ranks"])
        return list(dict.fromkeys(str(each["host"]) for each in workers if each.get("host")))


MOST_WRITERS = 64  # ranks that each write their steps; among more, the first writes for all


@dataclass(frozen=True)
class StepRecord:
    """A training step as recorded by one rank, a line of ``steps.rank<k>.jsonl``.

    An example:

    ``{"step": 12, "epoch": 0, "loss": 2.2841, "lr": 0.00052, "loss_scale": 1.0,
    "overflow": false, "grad_norm": 1.93, "n_local": 60, "n_global": 180,
    "t_data": 0.0011, "t_compute": 0.1432, "t_wait": 0.0213, "t_comm": 0.0052,
    "t_opt": 0.0031, "mem_peak_mib": 412.0, "samples_per_s": 1036.2, "weight": 180.0,
    "time": 1763693554.1, "t_host": 0.0004}``

    Attributes:
        step: optimizer steps since the start of training, from 0.
        loss: weighted mean over the *global* batch. With Local SGD, only the step of an averaging
            round has a loss, which is the mean over all samples between the two rounds before.
            Other steps then have null.
        loss_scale: factor on this step's loss.
        overflow: True if the gradient was not finite, and all ranks skipped the step. With Local
            SGD, only this rank skipped the step.
        grad_norm: norm of the unscaled gradient, before clipping; null after an overflow.
        n_local: samples of this rank.
        n_global: samples of all ranks together.
        t_data: seconds waiting for samples.
        t_compute: seconds of forward and backward until this rank's own gradient is ready.
        t_wait: seconds waiting for the slowest rank.
        t_comm: seconds of communication after the last rank was ready.
        t_opt: seconds of the gradient's norm, clipping and the optimizer.
        t_host: seconds of the loop's own Python while no device of this rank computes; 0 in older
            records. The six times sum to the duration of the step. A time is null if the engine
            cannot measure it separately.
        mem_peak_mib: largest memory that this rank has used so far, in MiB: GPU memory if it has a
            GPU, else RAM.
        samples_per_s: rate of all ranks together. Older records call it ``images_per_s``.
        weight: weight of the global batch, in the unit that run.json's ``task`` names: images,
            tokens.
        time: end of the step, seconds since 1970.
        others_ready: times of other ranks, in a run with more than MOST_WRITERS ranks, in which
            only the first rank writes records; see :func:`others_ready`. Else null.
    """

    step: int
    epoch: int
    loss: float | None
    lr: float
    loss_scale: float
    overflow: bool
    grad_norm: float | None
    n_local: int
    n_global: int
    t_data: float
    t_compute: float
    t_wait: float | None
    t_comm: float | None
    t_opt: float
    mem_peak_mib: float | None
    samples_per_s: float
    weight: float
    time: float
    others_ready: Mapping[str, Any] | None = None
    t_host: float = 0.0


# Fields of a rank that are null if another rank's line stands in for it.
OWN_PART: JsonDict = dict.fromkeys(
    ("n_local", "t_data", "t_compute", "t_wait", "t_comm", "t_opt", "t_host", "mem_peak_mib")
)
OWN_STEP: JsonDict = dict.fromkeys(("grad_norm", "overflow", "loss_scale"))  # in Local SGD


def others_ready(
    ready_s: Sequence[float], counts: Sequence[int], ranks: Sequence[int]
) -> JsonDict | None:
    """Return the first, the middle and the last rank that was ready, for the first rank's record.

    ``{"least": {"rank": 17, "ready_s": 0.131, "n_local": 60}, "middle": {"rank": 4, "ready_s":
    0.1443, "n_local": 60}, "largest": {"rank": 70, "ready_s": 0.1656, "n_local": 31}}``

    A rank's ``ready_s`` is the time in seconds from the start of the step until its own gradient
    was ready. This time is the sum of ``t_data``, ``t_compute`` and ``t_host``, except for seconds
    after the all-reduce. A rank's ``t_wait`` is the largest ``ready_s`` of all ranks minus its own.

    Args:
        ready_s: seconds of each rank, the first rank's first.
        counts: samples of each rank.
        ranks: number of each rank in the launch.

    Returns:
        None if a rank's time is unknown, or there are fewer than two ranks.
    """
    if not all(ready_s) or len(ready_s) < 2:
        return None
    others = sorted([*zip(ready_s, ranks, counts, strict=True)][1:])
    shown = {"least": others[0], "middle": others[len(others) // 2], "largest": others[-1]}
    return {
        name: {"rank": rank, "ready_s": seconds, "n_local": count}
        for name, (seconds, rank, count) in shown.items()
    }


EMA = "ema_"  # prefix of the name of a metric


@dataclass(frozen=True)
class EpochRecord:
    """An evaluation, a line of ``epochs.jsonl``.

    An example:

    ``{"step": 120, "epoch": 9, "samples": 360, "seconds": 1.4, "time": 1763693554.1,
    "top1": 0.9722, "loss": 0.1021}``

    Attributes:
        metrics: the task's metrics of the model, by name, ``loss`` among them. Metrics with the
            prefix EMA are of the averaged parameters, if the run averages parameters. The name of a
            metric of a further held-out set begins with the set's name, as in ``night/loss``.
        sets: number of samples of each further held-out set, by the set's name. Lines of runs
            without further sets do not have the field.
    """

    step: int
    epoch: int
    samples: int
    seconds: float
    time: float
    metrics: Mapping[str, float]
    sets: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> JsonDict:
        """Return the record as the object of a line in ``epochs.jsonl``."""
        line = {each.name: getattr(self, each.name) for each in fields(self)}
        del line["metrics"]
        if not self.sets:
            del line["sets"]
        return {**line, **self.metrics}

    def list_parts(self) -> list[tuple[str, int, dict[str, float], dict[str, float]]]:
        """Return the name, samples, metrics, and averaged parameters' metrics of each held-out set.

        The name of the main held-out set is empty. Names of metrics have no prefix.
        """
        result = []
        for name, samples in [("", self.samples), *self.sets.items()]:
            own, averaged = dict[str, float](), dict[str, float]()
            for each, value in self.metrics.items():
                part, _, metric = each.removeprefix(EMA).partition("/")
                is_of_set = part in self.sets
                if name == (part if is_of_set else ""):
                    plain = metric if is_of_set else each.removeprefix(EMA)
                    (averaged if each.startswith(EMA) else own)[plain] = value
            result.append((name, samples, own, averaged))
        return result

    @classmethod
    def from_json(cls, line: JsonDict) -> "EpochRecord":
        """Read the result of :meth:`as_json`."""
        metrics = cls.read_metrics(line)
        return cls(**{k: v for k, v in line.items() if k not in metrics}, metrics=metrics)

    @classmethod
    def read_metrics(cls, line: JsonDict) -> JsonDict:
        """Return the metrics in a line of ``epochs.jsonl``, in the line's order."""
        known = {each.name for each in fields(cls)}
        return {name: value for name, value in line.items() if name not in known}
