"""The tracker Weights & Biases, which uses no network unless WANDB_MODE allows it."""

import os
import re
import secrets
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from motley.publish.series import Note, Row
from motley.publish.trackers import Published, Tracker
from motley.records.json_files import JsonDict
from motley.registry import import_extra

_ONLINE_S = 60.0  # seconds after which published records have certainly been sent
_STEPPED = ("all/*", "evaluation/*", "others/*", "rank/*", "event/*")
_TIMED = ("cpu/*", "gpu/*")


class WandB(Tracker):
    """A run in Weights & Biases.

    Values of steps and evaluations are drawn over ``step``. Values of devices are drawn over
    ``seconds`` since the start of the run.

    Offline, each session of publishing makes a folder of files. The folder of a killed process may
    be incomplete. This folder is removed, and its records are published again.
    """

    name, says = "wandb", "Weights & Biases: offline, or as WANDB_MODE says"

    @classmethod
    def check(cls) -> None:
        """Raise MotleyError if a package for Weights & Biases is missing."""
        _module()

    def __init__(self, run: Published, memory: JsonDict) -> None:
        """Open the run in Weights & Biases; see :meth:`Tracker.__init__`."""
        mode = os.environ.get("WANDB_MODE") or "offline"
        offline = mode == "offline"
        folder = Path(os.environ.get("WANDB_DIR") or run.folder.path)
        self._to = {"mode": mode, "project": run.project}
        self.settles_s = None if offline else _ONLINE_S
        known = re.fullmatch("[0-9a-f]{8}", str(memory.get("run")))  # it is part of a pattern below
        self.anew = not known or any(memory.get(name) != to for name, to in self._to.items())
        self._id = secrets.token_hex(4) if self.anew else str(memory["run"])
        self._whole = [] if self.anew else [str(name) for name in memory["sessions"]]  # closed
        if offline:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            _remove_torn(folder / "wandb", self._id, self._whole)
        self._published, self._folder, self._run = run, folder, cast(Any, None)
        sessions = shlex.quote(str(folder / "wandb")) + f"/*{self._id}"
        self.look = f"wandb sync --append {sessions}" if offline else "https://wandb.ai"

    def _open(self) -> Any:
        """Open a session when the first record is published, so that no session is empty."""
        run, wandb = self._published, _module()
        self._run = wandb.init(
            project=run.project, id=self._id, name=run.name, resume="allow", mode=self._to["mode"],
            dir=str(self._folder), config=dict(run.parameters) if self.anew else None,
            settings=wandb.Settings(
                console="off", silent=True, x_disable_stats=True, x_disable_meta=True,
                disable_git=True, disable_code=True,
            ),
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("seconds")
        for names, over in ((_STEPPED, "step"), (_TIMED, "seconds")):
            for name in names:
                self._run.define_metric(name, step_metric=over)
        if self.settles_s is not None:
            self.look = str(self._run.url)
        return self._run

    def memory(self) -> JsonDict:
        """Return the state with which a later process continues; see Tracker."""
        return {**self._to, "run": self._id, "sessions": self._whole}

    def publish(self, steps: Sequence[Row], samples: Sequence[Row], notes: Sequence[Note]) -> None:
        """Send rows and notes to Weights & Biases; see :meth:`Tracker.publish`."""
        self._run = self._run or self._open()
        for row in steps:
            self._log(row.step, row.time, row.values)
        for row in samples:
            self._log(None, row.time, row.values)
        for note in notes:
            self._log(note.step, note.time, {f"event/{note.kind}": note.text})

    def _log(self, step: int | None, time: float, values: Any) -> None:
        at = {} if step is None else {"step": step}
        self._run.log({**values, **at, "seconds": time - self._published.started})

    def close(self, status: str) -> None:
        """End the run in Weights & Biases; see :meth:`Tracker.close`."""
        if self._run is None:
            return
        session = Path(self._run.settings.sync_dir).name
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)
        self._whole = [*self._whole, session]


def _remove_torn(folder: Path, run: str, whole: list[str]) -> None:
    """Remove the files of those sessions of a run that were not closed."""
    for session in folder.glob(f"offline-run-*-{run}"):
        if session.name not in whole and not session.is_symlink():
            shutil.rmtree(session)


def _module() -> Any:
    return import_extra("wandb", "--to wandb", where="")


TRACKERS = (WandB,)
