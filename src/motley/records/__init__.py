"""A run's records as columns, for pandas, polars, or plain Python."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.records.gpu_csv import GpuSample, read_gpu_log
from motley.records.json_files import JsonDict, to_json
from motley.records.run_folder import RunFolder, open_run
from motley.records.training import EpochRecord, RankGroups

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

    All columns of a dict have one length, and each has one type. None stands for an unknown value.
    ``pandas.DataFrame(run.steps)`` and ``polars.DataFrame(run.steps)`` accept such a dict.

    Times of day (``time``) are seconds since 1970-01-01 UTC; pandas makes dates of them with
    ``pandas.to_datetime(run.steps["time"], unit="s")``.

    Attributes:
        path: its folder.
        about: run.json, as it is: status, config, versions, facts, ranks, plan, result, ...
        steps: a row a step and rank, by rank, then by step; of more than 64 ranks, of the first:

            - ``rank``, ``host``: whose row it is.
            - ``step``: optimizer steps since the start, from 0. ``epoch``: from 0.
            - ``loss``: mean over the global batch, by weight. ``lr``: learning rate.
            - ``loss_scale``: the factor of this step's loss. ``overflow``: the step was skipped.
            - ``grad_norm``: of the whole gradient, before clipping.
            - ``n_local``, ``n_global``: samples of this rank, of all ranks together.
            - ``t_data``, ``t_compute``, ``t_wait``, ``t_comm``, ``t_opt``, ``t_host``: seconds of
              this rank waiting for its samples; in forward and backward passes; waiting for the
              slowest rank; for the communication that is left then; in the optimizer; in the
              loop's own Python, beside which no device computes. They sum to the step.
            - ``mem_peak_mib``: most memory this rank has held, MiB.
            - ``samples_per_s``: of all ranks together. ``weight``: of the global batch, in the
              task's unit (images, tokens).
            - ``time``: end of the step, time of day.
        epochs: a row an evaluation:

            - ``step``: steps taken before it. ``epoch``: from 0.
            - ``samples``: that were evaluated. ``seconds``: that it took. ``time``: time of day.
            - one column a metric, such as ``top1`` (0 to 1) and ``loss``; those that begin with
              ``ema_`` are of the average of the parameters.
        events: a row an event, as they came:

            - ``time``: time of day. ``event``: its kind, such as overflow, fault, resume.
            - ``step``, ``rank``, ``host``: that it is of. ``text``: in words.
            - ``more``: its other fields, as JSON.
        gpus: a row a sample of a GPU, or of a host without one, by host, then by time:

            - ``time``: time of day. ``host``; ``gpu``: its number there, None: this is the CPU.
            - ``name``, ``uuid``: of the device. ``rank``: that computes on it.
            - ``epoch``, ``step``: that the run was in.
            - ``load``: 0 to 1. ``memory_used_mib``, ``memory_total_mib``: MiB, of the GPU or of
              the host. ``temperature_c``: degrees Celsius. ``power_w``: watts.
            - ``others_memory_mib``: MiB that other users hold. ``others``: their names.
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
        text = (f"{count} {word}{'s' if count != 1 else ''}" for word, count in rows.items())
        return f"<{self.path}, {self.about.get('status', 'no run.json')}: {', '.join(text)}>"


def load(path: str | Path) -> Run:
    """Read a run's records, of one that goes on too; see :class:`Run` for the columns, with units.

    Args:
        path: its folder, such as ``logs/RUN``.

    Raises:
        MotleyError: there is no run.
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
