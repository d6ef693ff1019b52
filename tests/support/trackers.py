"""What trackers hold, read with their own readers, and runs that are published to them."""

import importlib
import json
import math
import os
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forked import run_script
from live_runs import LiveRun
from project import ROOT

# Each number of a name: its step (None: it has none), and when, if the tracker takes that.
Held = dict[str, list[tuple[int | None, float | None, float]]]


def command(run: Path, tracker: str, *words: str) -> list[str]:
    """The command line that publishes a run."""
    return [sys.executable, "plots/publish.py", str(run), "--to", tracker, *words]


def environment(folder: Path) -> dict[str, str]:
    """Without any tracker's settings of whoever runs the tests."""
    known = {name: value for name, value in os.environ.items()
             if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}  # fmt: skip
    path = f"{ROOT / 'src'}:{known.get('PYTHONPATH', '')}"
    return {
        **known,
        "PYTHONPATH": path,
        "HOME": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
    }


def publish(run: Path, tracker: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Publish a run as a user does, and wait for it."""
    if tracker in _READERS:
        importlib.import_module(tracker)  # once for all that publish: MLflow's take 4 s
    _, script, *rest = command(run, tracker, *words)
    return run_script(script, *rest, variables=environment(run.parent))


def take(live: LiveRun, steps: int, **fields: Any) -> None:
    """Some steps of a run, with a sample of each device."""
    for _ in range(steps):
        live.take_step(**fields)
        live.take_samples()


def end(live: LiveRun, status: str = "finished") -> None:
    """It ends a minute ago, so that nobody waits for its last words."""
    live.run.update_run(status=status, ended=live.now - 60)
    live.close()


def held_by(tracker: str, run: Path) -> Held:
    """All numbers of a run that was published."""
    found: Held = defaultdict(list)
    for name, *value in _READERS[tracker](run):
        found[name].append(tuple(value))  # type: ignore[arg-type]
    return {name: sorted(values, key=lambda each: (each[0] or 0, each[1] or 0.0))
            for name, values in found.items()}  # fmt: skip


def _tensorboard(run: Path) -> Iterator[tuple[str, int, float, float]]:
    events = accumulator(run)
    for name in events.Tags()["scalars"]:
        for each in events.Scalars(name):
            yield name, each.step, each.wall_time, each.value


def accumulator(run: Path) -> Any:
    """TensorBoard's own reader of a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), {"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def _wandb(run: Path) -> Iterator[tuple[str, int | None, None, float]]:
    for record in wandb_records(run):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json)
                   for item in record.history.item}  # fmt: skip
            for name, value in row.items():
                if isinstance(value, int | float) and "/" in name:
                    yield name, row.get("step"), None, value


def wandb_records(run: Path) -> Iterator[Any]:
    """All records of its offline sessions, in order: LevelDB's log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        data, place, whole = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            left = 32768 - place % 32768
            if left < 7:
                place += left
                continue
            _, length, kind = struct.unpack("<IHB", data[place : place + 7])
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # whole, or its last part
                record = Record()
                record.ParseFromString(whole)
                yield record
                whole = b""


def mlflow_run(run: Path) -> tuple[Any, Any]:
    """A client, and the only run of the file of SQLite beside a run."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("motley").experiment_id])
    return client, found


def _mlflow(run: Path) -> Iterator[tuple[str, int, float, float]]:
    client, found = mlflow_run(run)
    for name in found.data.metrics:
        for each in client.get_metric_history(found.info.run_id, name):
            yield name, each.step, each.timestamp / 1000, each.value


def _trackio(run: Path) -> Iterator[tuple[str, int, None, float]]:
    import sqlite3

    with sqlite3.connect(run.parent / "trackio" / "motley.db") as database:
        for step, metrics in database.execute("SELECT step, metrics FROM metrics"):
            for name, value in json.loads(metrics).items():
                if "/" in name and not math.isnan(value):
                    yield name, step, None, value


_READERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
