"""The tracker TensorBoard: a file of events in the run's folder, without TensorFlow or torch."""

import contextlib
import shlex
from collections.abc import Sequence
from typing import Any

from motley.errors import MotleyError
from motley.publish.series import Note, Row
from motley.publish.trackers import Published, Tracker
from motley.records.json_files import JsonDict
from motley.registry import import_extra

_PROTO, _HPARAMS = "tensorboard.compat.proto", "tensorboard.plugins.hparams"


class TensorBoard(Tracker):
    """A run in TensorBoard. Each number has its own time, which TensorBoard's WALL axis shows.

    A process may be killed after it has written numbers and before it has saved its position. The
    next process removes these numbers from the file and writes them again.
    """

    name, says = "tensorboard", "TensorBoard: a file of events in the run's folder"

    @classmethod
    def check(cls) -> None:
        """Raise MotleyError if a package for TensorBoard is missing."""
        _module("tensorboard.summary.writer.record_writer")

    def __init__(self, run: Published, memory: JsonDict) -> None:
        """Open the run in TensorBoard; see :meth:`Tracker.__init__`."""
        # In the run's folder itself, so that TensorBoard names the run after the folder.
        self._path = run.folder.path / f"events.out.tfevents.{int(run.started)}.motley"
        if self._path.is_symlink():
            raise MotleyError(f"{self._path} is a symbolic link; remove it")
        saved = memory.get("bytes") if memory.get("file") == self._path.name else None
        size = self._path.stat().st_size if self._path.is_file() else 0
        self.anew = not isinstance(saved, int) or not 0 < saved <= size
        self._file = self._path.open("wb" if self.anew else "r+b")
        if not self.anew:
            self._file.truncate(saved)
            self._file.seek(0, 2)
        self._writer: Any = _module("tensorboard.summary.writer.record_writer").RecordWriter(
            self._file
        )
        self._events, self._summary = (
            _module(f"{_PROTO}.event_pb2"),
            _module(f"{_PROTO}.summary_pb2"),
        )
        self._last = 0
        if self.anew:
            self._begin(run)
        self._flush()
        self.look = f"tensorboard --logdir {shlex.quote(str(run.folder.path.parent))}"

    def _begin(self, run: Published) -> None:
        self._write(self._events.Event(wall_time=run.started, file_version="brain.Event:2"))
        about = _module(f"{_HPARAMS}.plugin_data_pb2")
        session = about.SessionStartInfo(start_time_secs=run.started)
        lines = ["| | |", "|---|---|"]
        for name, value in run.parameters.items():
            kind = (
                "bool_value" if isinstance(value, bool)
                else "string_value" if isinstance(value, str) else "number_value"
            )  # fmt: skip
            setattr(session.hparams[name], kind, value)
            lines.append(f"| {name} | {str(value).replace('|', ' ')} |")
        self._add_hparams("SESSION_START_INFO_TAG", run.started, session_start_info=session)
        self._add(0, run.started, [self._text("run", "\n".join(lines))])

    def _add_hparams(self, tag: str, time: float, **content: Any) -> None:
        hparams = _module(f"{_HPARAMS}.metadata")
        data = _module(f"{_HPARAMS}.plugin_data_pb2").HParamsPluginData(**content)
        self._add(0, time, [self._summary.Summary.Value(
            tag=getattr(hparams, tag), metadata=hparams.create_summary_metadata(data),
            tensor=hparams.NULL_TENSOR,
        )])  # fmt: skip

    def memory(self) -> JsonDict:
        """Return the state with which a later process continues; see Tracker."""
        return {"file": self._path.name, "bytes": self._bytes}

    def publish(self, steps: Sequence[Row], samples: Sequence[Row], notes: Sequence[Note]) -> None:
        """Send rows and notes to TensorBoard; see :meth:`Tracker.publish`."""
        for row in (*steps, *samples):
            value = self._summary.Summary.Value
            self._add(row.step, row.time, [
                value(tag=name, simple_value=number) for name, number in row.values.items()
            ])  # fmt: skip
        for note in notes:
            self._add(note.step, note.time, [self._text(f"events/{note.kind}", note.text)])
        self._flush()

    def _flush(self) -> None:
        self._writer.flush()
        self._bytes = self._file.tell()

    def _text(self, tag: str, text: str) -> Any:
        tensor = _module(f"{_PROTO}.tensor_pb2").TensorProto(
            dtype=_module(f"{_PROTO}.types_pb2").DT_STRING, string_val=[text.encode()],
            tensor_shape=_module(f"{_PROTO}.tensor_shape_pb2").TensorShapeProto(),
        )  # fmt: skip
        metadata = _module("tensorboard.plugins.text.metadata").create_summary_metadata("", "")
        return self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)

    def _add(self, step: int | None, time: float, values: list[Any]) -> None:
        self._last = max(self._last, step or 0)
        summary = self._summary.Summary(value=values)
        step = self._last if step is None else step
        self._write(self._events.Event(wall_time=time, step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def close(self, status: str) -> None:
        """End the run in TensorBoard; see :meth:`Tracker.close`."""
        with contextlib.suppress(OSError):  # a full disk was reported already
            self._writer.close()


def _module(name: str) -> Any:
    return import_extra(name, "--to tensorboard", "tensorboard", where="")


TRACKERS = (TensorBoard,)
