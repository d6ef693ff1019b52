"""The records of a run as columns, for pandas, polars, or plain Python."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.records.gpu_csv import GpuSample, read_gpu_log
from motley.records.json_files import JsonDict, to_json
from motley.records.run_folder import RunFolder, open_run
from motley.records.training import EpochRecord, RankGroups
from motley.text import plural

Columns = dict[str, list[Any]]

_STEPS = {
    "rank": int, "host": str, "step": int, "epoch": int, "loss": float, "lr": float,
    "loss_scale": float, "overflow": bool, "grad_norm": float, "n_local": int, "n_global": int,
    "t_data": float, "t_compute": float, "t_wait": float, "t_comm": float, "t_opt": float,
    "t_host": float, "mem_peak_mib": float, "samples_per_s": float, "weight": float, "time": float,
}  # fmt: skip
_EPOCHS = {"step": int, "epoch": int, "samples": int, "seconds": float, "time": float}
_EVENTS = {"time": float, "event": str, "step": int, "rank": int, "host": str, "text": str}
_SAMPLES = {
    "time": float, "host": str, "gpu": str, "name": str, "uuid": str, "rank": int, "epoch": int,
    "step": int, "load": float, "memory_used_mib": float, "memory_total_mib": float,
    "temperature_c": float, "power_w": float, "others_memory_mib": float, "others": str,
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Run:
    """The records of a run, as four dicts of columns.

    All columns of a dict have the same length, and each has one type. None stands for an unknown
    value. ``pandas.DataFrame(run.steps)`` and ``polars.DataFrame(run.steps)`` accept such a dict.

    Times of day (``time``) are seconds since 1970-01-01 UTC. In pandas,
    ``pandas.to_datetime(run.steps["time"], unit="s")`` converts them to dates.

    Attributes:
        path: folder of the run.
        about: content of run.json: status, config, versions, facts, ranks, plan, result, ...
        steps: one row per step and rank, sorted by rank, then by step. With more than 64 ranks,
            only the first rank has rows.

            - ``rank``: number of the rank. ``host``: host of the rank.
            - ``step``: optimizer steps since the start, from 0. ``epoch``: number, from 0.
            - ``loss``: weighted mean over the global batch. ``lr``: learning rate.
            - ``loss_scale``: factor on this step's loss. ``overflow``: True for a skipped step.
            - ``grad_norm``: norm of the gradient of all parameters, before clipping.
            - ``n_local``: samples of this rank. ``n_global``: samples of all ranks together.
            - ``t_data``: seconds in which the rank waited for samples.
            - ``t_compute``: seconds in forward and backward passes.
            - ``t_wait``: seconds in which the rank waited for the slowest rank.
            - ``t_comm``: seconds of communication after the slowest rank was ready.
            - ``t_opt``: seconds in the optimizer.
            - ``t_host``: seconds in the loop's own Python, while no device computes. The six times
              sum to the step.
            - ``mem_peak_mib``: largest memory of this rank so far, MiB.
            - ``samples_per_s``: rate of all ranks together. ``weight``: weight of the global batch,
              in the task's unit (images, tokens).
            - ``time``: time of day at the end of the step.
        epochs: one row per evaluation.

            - ``step``: steps taken before the evaluation. ``epoch``: number, from 0.
            - ``samples``: evaluated samples. ``seconds``: duration. ``time``: time of day.
            - one column per metric, such as ``top1`` (0 to 1) and ``loss``. Metrics with the prefix
              ``ema_`` are those of the average of the parameters.
        events: one row per event, in the order of their record.

            - ``time``: time of day. ``event``: kind, such as overflow, fault, resume.
            - ``step``, ``rank``, ``host``: step, rank and host of the event.
            - ``text``: the event in words. ``more``: all other fields, as JSON.
        gpus: one row per sample of a GPU, or of a host without one, sorted by host, then by time.

            - ``time``: time of day. ``host``: name of the host.
            - ``gpu``: number of the GPU on the host; None: the device is a CPU.
            - ``name``, ``uuid``: name and UUID of the device.
            - ``rank``: rank that computes on the device.
            - ``epoch``, ``step``: position of the run at that time.
            - ``load``: 0 to 1. ``memory_used_mib``, ``memory_total_mib``: memory of the GPU or of
              the host, MiB. ``temperature_c``: degrees Celsius. ``power_w``: watts.
            - ``others_memory_mib``: memory of other users, MiB. ``others``: their names.
    """

    path: Path
    about: JsonDict
    steps: Columns
    epochs: Columns
    events: Columns
    gpus: Columns

    def __repr__(self) -> str:
        counts = {"step": self.steps, "evaluation": self.epochs, "event": self.events,
                  "GPU sample": self.gpus}  # fmt: skip
        rows = {word: len(columns["time"]) for word, columns in counts.items()}
        parts = (plural(count, word) for word, count in rows.items())
        return f"<{self.path}, {self.about.get('status', 'no run.json')}: {', '.join(parts)}>"


def load(path: str | Path) -> Run:
    """Return the records of a run, which may be running; see :class:`Run` for the columns.

    Args:
        path: folder of the run, such as ``logs/RUN``.

    Raises:
        MotleyError: the folder has no run.
    """
    run = open_run(path)
    about = run.read_run()
    groups = RankGroups(about)
    steps = (
        {**line, "rank": rank, "host": groups.worker(rank, _step(line)).get("host")}
        for rank, lines in run.read_steps().items() for line in lines
    )  # fmt: skip
    epochs = run.read_epochs()
    metrics = {name: float for line in epochs for name in EpochRecord.read_metrics(line)}
    events = [{**line, "more": _rest(line)} for line in run.read_events()]
    return Run(
        run.path, about, _columns(steps, _STEPS), _columns(epochs, _EPOCHS | metrics),
        _columns(events, {**_EVENTS, "more": str}),
        _columns((vars(sample) for sample in _samples(run)), _SAMPLES),
    )  # fmt: skip


def _samples(run: RunFolder) -> list[GpuSample]:
    result = []
    for path in run.gpu_files().values():
        try:
            result += read_gpu_log(path, _show_progress)
        except MotleyError as error:
            _show_progress(f"{error}; left out")
    return result


def _show_progress(text: str) -> None:
    print(f"motley: {text}")


def _step(line: Mapping[str, Any]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def _rest(line: Mapping[str, Any]) -> str | None:
    rest = {name: value for name, value in line.items() if name not in _EVENTS}
    return to_json(rest) if rest else None


def _columns(rows: Iterable[Mapping[str, Any]], kinds: Mapping[str, type]) -> Columns:
    columns: Columns = {name: [] for name in kinds}
    for row in rows:
        for name, kind in kinds.items():
            columns[name].append(_value(row.get(name), kind))
    return columns


def _value(value: Any, kind: type) -> Any:
    """Return a value of the given type; None for another type, and for an empty text."""
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind and value != "" else None


__all__ = ["Run", "load"]
