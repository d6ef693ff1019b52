"""The folder of a matrix's results, and the outcome of each of its runs.

The outcome states that the run is done, or how, where and when the run failed.

    matrix.json            the settings of the matrix, to which the folder belongs
    cells/<cell>.<k>/      the run folder of repeat k, with its output and outcome beside it
    results.csv, results.md

A single command measures all cells, or each task of a Slurm array measures one cell. The command
that measures a cell holds the lock of the cell.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from motley.errors import MotleyError
from motley.faults import FaultKind, kind_of_text
from motley.records.json_files import read_json, write_json
from motley.records.run_folder import RunFolder, one_at_a_time, take_folder
from motley.sweep.matrix import Cell, Matrix
from motley.text import format_step

DONE = "done"
_SIGNAL = re.compile(r"(?:exited on|by) signal (\d+)")  # in messages of mpirun
_SIGNALS = {
    11: FaultKind.SEGFAULT, 7: FaultKind.SEGFAULT, 6: FaultKind.ABORTED,
    4: FaultKind.ILLEGAL_INSTRUCTION,
}  # fmt: skip
_NOISE = re.compile(r"^[-\s]*$|prterun|mpirun|Process name:|Exit code:|thus causing")
_LONGEST = 400


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        kind: ``done``, or a :class:`motley.faults.FaultKind`.
        error: description of the failure; empty if the run is done.
        host: host of the failure; None: unknown.
        rank: rank of the failure; None: unknown.
        epoch: number of the last epoch of the run; None: unknown.
        step: number of the step that failed, or of the last step; None: unknown.
        phase: key of the :class:`motley.faults.Phase` in which the run failed; None: unknown.
        seconds: duration of the run in seconds.
    """

    kind: str
    error: str = ""
    host: str | None = None
    rank: int | None = None
    epoch: int | None = None
    step: int | None = None
    phase: str | None = None
    seconds: float = 0.0

    @property
    def when(self) -> str:
        """Epoch, step and phase of the failure as text, such as ``epoch 0, step 4, backward``.

        The text counts steps from 1, and :attr:`step` counts them from 0.
        """
        parts = [
            None if self.epoch is None else f"epoch {self.epoch}",
            None if self.step is None else format_step(self.step), self.phase,
        ]  # fmt: skip
        return ", ".join(filter(None, parts))


def judge(
    status: int | None,
    output: str,
    run: Mapping[str, Any],
    steps: Mapping[int, Sequence[Mapping[str, Any]]],
    seconds: float = 0.0,
) -> Outcome:
    """Return the outcome of a run.

    Args:
        status: exit status of mpirun; None: the run was ended because it took too long. Since
            mpirun also returns 0 after the loss of a host, a run is done only if its run.json has
            the status ``finished``.
        output: all output of the run.
        run: content of run.json; empty if there is none.
        steps: records of the steps, by rank; empty if there are none.
        seconds: duration of the run in seconds.
    """
    failure: Mapping[str, Any] = run.get("failure") or {}
    epoch = max((line[-1]["epoch"] for line in steps.values() if line), default=None)
    if status is not None and run.get("status") == "finished":
        return Outcome(DONE, epoch=epoch, step=_last_step(steps), seconds=seconds)
    error = str(failure.get("error", "")) or _last_words(output)
    if status is None:
        kind = FaultKind.HANG
        error = f"still running after {seconds:.0f} s" + (f"; {error}" if error else "")
    else:
        kind = _kind(failure, status, output, error)
    step, phase = failure.get("step"), failure.get("phase")
    if step is None and (taken := _last_step(steps)) is not None:
        step, phase = taken + 1, None  # a rank's last report can be half a second old
    known = status is not None  # a rank that was stopped is not to blame
    return Outcome(
        kind, error[:_LONGEST] or f"ended with status {status} and without a message",
        failure.get("host") if known else None, failure.get("rank") if known else None,
        epoch, step, (phase or None) if known else None, seconds,
    )  # fmt: skip


def _last_step(steps: Mapping[int, Sequence[Mapping[str, Any]]]) -> int | None:
    return max((line[-1]["step"] for line in steps.values() if line), default=None)


def _kind(failure: Mapping[str, Any], status: int, output: str, error: str) -> FaultKind:
    """Return the kind of a failure from the records. Without records, use the exit status."""
    if not failure:
        by_status = {kind.code: kind for kind in (FaultKind.REFUSED, FaultKind.OUT_OF_MEMORY)}
        return by_status.get(status) or kind_of_text(error)
    kind = FaultKind(failure["kind"])
    if kind is FaultKind.KILLED and (result := _SIGNAL.search(output)):
        return _SIGNALS.get(int(result[1]), kind)
    return kind


def _last_words(output: str) -> str:
    """Return Motley's last message in an output.

    If Motley has printed no message, return the last line that the launcher has not printed.
    """
    lines = [line.strip() for line in output.splitlines()]
    ours = [line.removeprefix("motley: ") for line in lines if line.startswith("motley: ")]
    rest = [line for line in lines if not _NOISE.search(line)]
    return (ours or rest or lines or [""])[-1]


class BaselineFolder:
    """The folder with the results of one matrix of runs."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.cells = self.path / "cells"

    def claim(self, matrix: Matrix) -> TextIO:
        """Lock the folder for this matrix, until the returned file is closed or this process ends.

        Raises:
            MotleyError: the folder belongs to another matrix, or is in use.
        """
        file, ours = self.path / "matrix.json", matrix.as_json()
        if file.exists():
            saved = self._check(ours)
            ours["cells"] = [*{**saved, **{cell["name"]: cell for cell in ours["cells"]}}.values()]
        elif self.path.exists() and any(self.path.iterdir()):
            raise MotleyError(
                f"{self.path} holds files that are not results of a matrix; choose another folder "
                "with --out"
            )
        self.cells.mkdir(parents=True, exist_ok=True)
        lock = take_folder(
            self.path,
            f"{self.path} is in use by another baseline_measure.py",
            "wait for it, or choose another folder with --out",
        )
        write_json(file, ours)
        return lock

    def join(self, matrix: Matrix) -> None:
        """Raise MotleyError unless :meth:`claim` has prepared the folder for this matrix.

        A Slurm task, which measures one cell, calls this method.
        """
        ours = matrix.as_json()
        if not (self.path / "matrix.json").exists():
            raise MotleyError(
                f"{self.path} is not prepared for Slurm tasks; submit them with "
                "setup/slurm_job.sh --array, from the same folder"
            )
        saved = self._check(ours)
        if lacking := [cell["name"] for cell in ours["cells"] if cell["name"] not in saved]:
            raise MotleyError(
                f"{self.path} holds a matrix that lacks {', '.join(lacking[:4])}; choose another "
                "folder with --out"
            )

    def _check(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stored cells by name.

        Raises:
            MotleyError: the folder holds another matrix.
        """
        theirs = read_json(self.path / "matrix.json")
        saved = {cell["name"]: cell for cell in theirs.get("cells", [])}
        clashes = [key for key in ("steps", "options", "hosts") if theirs.get(key) != ours[key]] + [
            cell["name"] for cell in ours["cells"] if saved.get(cell["name"], cell) != cell
        ]
        if clashes:
            raise MotleyError(
                f"{self.path} holds the results of another matrix, which differs in "
                f"{', '.join(clashes[:4])}; choose another folder with --out"
            )
        return saved

    def take_cell(self, cell: Cell) -> TextIO:
        """Lock a cell for its measurement, until the returned file is closed or this process ends.

        Raises:
            MotleyError: another process measures the cell.
        """
        return take_folder(
            self.cells, f"{cell.name} in {self.path} is being measured by another process",
            "wait for it, or choose another folder with --out", f".{cell.name}.lock",
        )  # fmt: skip

    def writing_table(self) -> contextlib.AbstractContextManager[None]:
        """Return a lock under which one process at a time reads outcomes and writes the table."""
        return one_at_a_time(self.path / ".table.lock")

    def matrix_cells(self) -> list[Cell]:
        """Return all cells of the folder's matrix, references included.

        Raises:
            MotleyError: there is no matrix in the folder.
        """
        file = self.path / "matrix.json"
        try:
            cells = read_json(file)["cells"]
            return [Cell(**{**cell, "options": tuple(cell["options"])}) for cell in cells]
        except FileNotFoundError:
            raise MotleyError(f"{file} does not exist") from None
        except (KeyError, TypeError) as error:
            raise MotleyError(f"{file} was not written by baseline_measure.py: {error}") from None

    def attempt(self, cell: Cell, repeat: int) -> RunFolder:
        """Return the run folder of one repeat of a cell."""
        return RunFolder(self.cells / f"{cell.name}.{repeat}")

    def output(self, cell: Cell, repeat: int) -> Path:
        """Return the path of the file with the output that a repeat of a cell has printed."""
        return self.cells / f"{cell.name}.{repeat}.log"

    def _outcome(self, cell: Cell, repeat: int) -> Path:
        return self.cells / f"{cell.name}.{repeat}.json"

    def end(self, cell: Cell, repeat: int, status: int | None, seconds: float) -> Outcome:
        """Judge a repeat that has ended, store its outcome, and return the outcome.

        A repeat with a stored outcome is not run again.
        """
        folder = self.attempt(cell, repeat)
        output = self.output(cell, repeat).read_text(errors="replace")
        outcome = judge(status, output, folder.read_run(), folder.read_steps(), seconds)
        shutil.rmtree(folder.checkpoints, ignore_errors=True)  # the run is never continued
        write_json(self._outcome(cell, repeat), asdict(outcome))
        return outcome

    def outcome(self, cell: Cell, repeat: int) -> Outcome | None:
        """Return the outcome of a repeat. None: the repeat has not ended."""
        file = self._outcome(cell, repeat)
        return Outcome(**read_json(file)) if file.exists() else None

    def repeats(self, cell: Cell) -> list[tuple[RunFolder, Outcome]]:
        """Return the run folder and the outcome of each repeat of a cell that has ended."""
        result: list[tuple[RunFolder, Outcome]] = []
        while outcome := self.outcome(cell, len(result)):
            result.append((self.attempt(cell, len(result)), outcome))
        return result

    def configuration(self) -> str:
        """Return a text that describes the hosts, versions and settings of all finished runs."""
        content = read_json(self.path / "matrix.json")
        done = [
            about for cell in self.matrix_cells() for run, outcome in self.repeats(cell)
            if outcome.kind == DONE and "versions" in (about := run.read_run())
        ]  # fmt: skip
        if not done:
            return "No run is done.\n"
        first, widest = done[0], max(done, key=lambda run: len(run["ranks"]))
        config, versions = first["config"], first["versions"]
        what = (first.get("task") or {}).get("title") or f"{config['model']} on {config['dataset']}"
        workers = [f"{worker['host']}: {worker['device']}" for worker in widest["ranks"]]
        day = time.strftime("%Y-%m-%d", time.gmtime(first["started"]))
        return "\n".join([
            f"- {what}, {content['steps']} steps per run; the first third is not counted; "
            f"{' '.join(content['options'])}",
            f"- ranks: {'; '.join(workers)}",
            f"- {day}, " + ", ".join(f"{name} {v}" for name, v in versions.items() if v)
            + f"; commit {first['commit'] or 'unknown'}",
            "",
        ])  # fmt: skip
