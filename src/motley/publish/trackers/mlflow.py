"""The tracker MLflow: the server in MLFLOW_TRACKING_URI, or an SQLite file beside the run."""

import os
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from motley.errors import MotleyError
from motley.publish.series import Note, Row
from motley.publish.trackers import Published, Tracker
from motley.records.json_files import JsonDict
from motley.registry import import_extra
from motley.text import format_step

_FILE = "mlflow.db"
_AT_ONCE, _PARAMETERS = 1000, 100  # numbers, and parameters, that MLflow accepts in one request
_LONGEST, _NOTES = 6000, 5000  # characters of a parameter, of a description
_DESCRIPTION = "mlflow.note.content"
_ENDS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflow(Tracker):
    """A run in MLflow.

    Every number has its own time. If a number is sent twice, MLflow stores it once. Events are
    written into the run's description.
    """

    name = "mlflow"
    says = f"MLflow: as MLFLOW_TRACKING_URI says, or {_FILE} in the folder of the run's folder"

    @classmethod
    def check(cls) -> None:
        """Raise MotleyError if a package for MLflow is missing."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # uses the network by default
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        _module("mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            for name in ("sqlalchemy", "alembic"):  # mlflow-skinny does not require these
                _module(name)

    def __init__(self, run: Published, memory: JsonDict) -> None:
        """Open the run in MLflow; see :meth:`Tracker.__init__`."""
        folder, server = run.folder.path.parent, os.environ.get("MLFLOW_TRACKING_URI")
        self._to = {"uri": server or _store(str(folder / _FILE)), "project": run.project}
        self._entities = _module("mlflow.entities")
        self._client = _module("mlflow").MlflowClient(tracking_uri=self._to["uri"])
        self._id, self._last, self._ended = "", 0, 0
        if all(memory.get(name) == value for name, value in self._to.items()):
            try:
                self._id = self._client.get_run(str(memory["run"])).info.run_id
            except _module("mlflow.exceptions").MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        self.anew = not self._id
        if self.anew:
            self._begin(run, None if server else str(folder / "mlartifacts"))
        else:
            self._client.update_run(self._id, status="RUNNING")
        self.look = f"mlflow ui --backend-store-uri {shlex.quote(self._to['uri'])}"

    def _begin(self, run: Published, artifacts: str | None) -> None:
        param = self._entities.Param
        params = [param(name, str(value)[:_LONGEST]) for name, value in run.parameters.items()]
        result = self._client.get_experiment_by_name(run.project)
        group = (
            result.experiment_id if result
            else self._client.create_experiment(run.project, artifact_location=artifacts)
        )  # fmt: skip
        began = self._client.create_run(
            group, start_time=int(1000 * run.started), run_name=run.name
        )
        self._id = began.info.run_id
        for first in range(0, len(params), _PARAMETERS):
            self._client.log_batch(self._id, params=params[first : first + _PARAMETERS])

    def memory(self) -> JsonDict:
        """Return the state with which a later process continues; see Tracker."""
        return {**self._to, "run": self._id}

    def publish(self, steps: Sequence[Row], samples: Sequence[Row], notes: Sequence[Note]) -> None:
        """Send rows and notes to MLflow; see :meth:`Tracker.publish`."""
        metrics = []
        for row in (*steps, *samples):
            self._last = max(self._last, row.step or 0)
            step, when = self._last if row.step is None else row.step, int(1000 * row.time)
            self._ended = max(self._ended, when)
            metrics += [
                self._entities.Metric(name, value, when, step) for name, value in row.values.items()
            ]
        for first in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[first : first + _AT_ONCE])
        if notes:
            self._describe([_line(note) for note in notes])

    def _describe(self, lines: list[str]) -> None:
        tags = self._client.get_run(self._id).data.tags
        before = tags.get(_DESCRIPTION, "").splitlines()
        lines = [*before, *(line for line in lines if line not in before)]
        while sum(map(len, lines)) + len(lines) > _NOTES and len(lines) > 1:
            del lines[0]  # the last lines are kept, since they describe the end of the run
        self._client.set_tag(self._id, _DESCRIPTION, "\n".join(lines)[:_NOTES])

    def close(self, status: str) -> None:
        """End the run in MLflow; see :meth:`Tracker.close`."""
        if status in _ENDS:
            self._client.set_terminated(self._id, _ENDS[status], end_time=self._ended or None)


def _module(name: str) -> Any:
    return import_extra(name, "--to mlflow", "mlflow", where="")


def _line(note: Note) -> str:
    when = datetime.fromtimestamp(note.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    at = "" if note.step is None else f", {format_step(note.step)}"
    return f"- {when}{at}, {note.kind}: {note.text}"


def _store(path: str) -> str:
    """Return the address of an SQLite file. Raise MotleyError if MLflow cannot use the path."""
    if re.search(r"[?#%]", path):
        raise MotleyError(
            f"MLflow cannot use the path {path}, because ?, # and % have another meaning in an "
            "address; name another place with MLFLOW_TRACKING_URI"
        )
    return f"sqlite:///{path}"


TRACKERS = (MLflow,)
