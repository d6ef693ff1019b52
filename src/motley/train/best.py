"""The best evaluation of a run, and the end of a run that no longer improves.

Rank 0 compares the evaluations, and all ranks act on this comparison. Different hosts may round a
metric differently, so that their own comparisons could differ.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley.comm.collectives import all_gather_floats, all_gather_object
from motley.config.option import MAX, MIN, Metric
from motley.config.options import Config
from motley.errors import MotleyError
from motley.records.training import EMA, EpochRecord
from motley.tasks.model import TaskModel, compute_metrics
from motley.tasks.task import Task
from motley.text import did_you_mean

_USUAL = Metric("loss")
# Words in the names of metrics, by the better direction.
_WORDS = {
    MIN: ("loss", "perplexity", "bits_per_byte", "error", "mae", "mse", "rmse", "wer", "cer"),
    MAX: (
        "top1", "top5", "accuracy", "acc", "f1", "auroc", "auc", "map", "iou", "bleu", "rouge",
        "precision", "recall", "r2",
    ),
}  # fmt: skip


def find_metric(config: Config, model: TaskModel) -> Metric | None:
    """Return the metric that selects the best evaluation; None if no option needs a metric.

    Args:
        config: the options.
        model: the model, whose task has the metrics.

    Raises:
        MotleyError: no evaluation has the metric, or its direction is unknown.
    """
    known = list_metrics(model, config)
    if config.keep_best is None and config.stop_after is None:
        return None
    chosen, flag = config.keep_best or _USUAL, "--keep-best" if config.keep_best else "--stop-after"
    if known and chosen.name not in known:
        raise MotleyError(
            f"{flag}: no evaluation has the metric "
            f"{chosen.name}{did_you_mean(chosen.name, known)}; name one of {', '.join(known)} "
            "with --keep-best"
        )
    direction = chosen.direction or _find_direction(chosen.name, model.task)
    if not direction:
        raise MotleyError(
            f"--keep-best {chosen.name}: the task does not declare whether a higher or a lower "
            f"value is better; write --keep-best {chosen.name}:{MAX} or --keep-best "
            f"{chosen.name}:{MIN}"
        )
    return Metric(chosen.name, direction)


def list_metrics(model: TaskModel, config: Config) -> list[str]:
    """Return the names of the metrics of an evaluation.

    The list is empty if the names are not known before the first evaluation.
    """
    try:
        own = list(model.task.summary(dict.fromkeys(model.score_names, 1.0)))
    except (ArithmeticError, LookupError, TypeError, ValueError):  # these means are made up
        return []
    if model.task.gathered:
        try:
            own += compute_metrics(model.task, model.gathered_example)
        except MotleyError as error:
            if not isinstance(error.__cause__, Exception) or isinstance(
                error.__cause__, NameError | AttributeError | ImportError
            ):
                raise  # every evaluation would fail
            return []  # one sample may have no such metric
    own += [f"{part}/{name}" for part in model.task.held_out_sets() for name in own]
    return own + [f"{EMA}{name}" for name in own] * config.model_ema


def _find_direction(name: str, task: Task) -> str:
    name = name.removeprefix(EMA).rpartition("/")[2]
    if name in task.directions:
        return task.directions[name]
    words = {name, *name.split("_")}
    return next((each for each, some in _WORDS.items() if words.intersection(some)), "")


@dataclass
class BestEvaluation:
    """The best evaluation so far, by one metric. NaN is never the best.

    Attributes:
        metric: the metric, with its direction.
        patience: number of evaluations without an improvement after which the run ends; None: a
            lack of improvement does not end the run.
        score: best value of the metric so far; NaN before the first evaluation.
        step: step of the best evaluation; None before the first evaluation.
        since: number of evaluations since the best one.
        saved: metric of the best evaluation whose checkpoint is in the run's folder. NaN: the
            folder has no checkpoint of an evaluation.
        saved_step: step of this checkpoint, or None.
        found_steps: steps of the checkpoints that were in the run's folder at the start.
    """

    metric: Metric
    patience: int | None = None
    score: float = math.nan
    step: int | None = None
    since: int = 0
    saved: float = math.nan
    saved_step: int | None = None
    found_steps: tuple[int, ...] = ()
    _last: tuple[float, int | None] = (math.nan, None)

    @classmethod
    def restore(
        cls,
        metric: Metric,
        patience: int | None,
        evaluations: Iterable[Mapping[str, Any]],
        saved_steps: Sequence[int],
    ) -> "BestEvaluation":
        """Find the best of all recorded evaluations. All ranks call this method.

        Args:
            metric: see the class.
            patience: see the class.
            evaluations: records of evaluations up to the position of the training. The records of
                rank 0 are used.
            saved_steps: steps of the checkpoints in the run's folder. The steps that rank 0 passes
                are used.
        """
        result = cls(metric, patience, found_steps=tuple(saved_steps))
        for step, record in sorted({each["step"]: each for each in evaluations}.items()):
            value = record.get(metric.name)
            score = float(value) if isinstance(value, int | float) else math.nan
            result._take(score, step)
            if step in saved_steps and result._is_better(score, result.saved):
                result.saved, result.saved_step = score, step
        found: BestEvaluation = all_gather_object(result)[0]
        return found

    def add(self, evaluation: EpochRecord) -> bool:
        """Add an evaluation. All ranks call this method.

        Returns:
            True if the evaluation is better than all evaluations whose checkpoints are in the run's
            folder.

        Raises:
            MotleyError: the evaluation does not have the metric.
        """
        if self.metric.name not in evaluation.metrics:
            known = list(evaluation.metrics)
            raise MotleyError(
                f"--keep-best {self.metric.name}: no evaluation has this metric"
                f"{did_you_mean(self.metric.name, known)}; name one of {', '.join(known)}"
            )
        ((score,), *_) = all_gather_floats([float(evaluation.metrics[self.metric.name])])
        self._take(score, evaluation.step)
        return self.is_to_be_saved

    @property
    def is_to_be_saved(self) -> bool:
        """True if the last evaluation is better than all evaluations with saved checkpoints."""
        return self._is_better(self._last[0], self.saved)

    def mark_saved(self) -> None:
        """Record that the checkpoint of the last added evaluation is in the run's folder."""
        self.saved, self.saved_step = self._last

    def _take(self, score: float, step: int) -> None:
        is_repeated = step == self._last[1]  # the run is evaluated again, without a further step
        self._last = score, step
        if self._is_better(score, self.score):
            self.score, self.step, self.since = score, step, 0
        elif not is_repeated:
            self.since += 1

    def _is_better(self, score: float, other: float) -> bool:
        if math.isnan(score) or math.isnan(other):
            return not math.isnan(score)
        return score < other if self.metric.direction == MIN else score > other

    @property
    def stops(self) -> bool:
        """True if the last ``patience`` evaluations brought no improvement. The run then ends."""
        return self.patience is not None and self.since >= self.patience

    def describe(self) -> str:
        """Return a text that describes the best evaluation."""
        if self.step is None:
            return f"no evaluation had a value of {self.metric.name}"
        return f"the best {self.metric.name} is {self.score:.6g}, after step {self.step:,}"

    def as_json(self) -> dict[str, float | int | bool]:
        """Return the best evaluation as entries for the run's result in run.json."""
        if self.step is None:
            return {"stopped_early": self.stops}
        return {"best_step": self.step, "best_score": self.score, "stopped_early": self.stops}
