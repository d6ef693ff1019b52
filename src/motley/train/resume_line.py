"""The command line that continues a run, whole and quoted, as a user pastes it."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from motley import ROOT
from motley.cluster.launcher import MPIRUN, Launcher, launch_of
from motley.records.run_folder import RunFolder

_REPLACED = ("--run", "--resume", "--logs")
_STARTERS = {Launcher.MPI: "mpirun", Launcher.SLURM: "srun", Launcher.TORCHRUN: "torchrun"}


def resume_line(folder: RunFolder) -> str:
    """Return the line that continues this process's run: what the user typed, and ``--resume``."""
    words = sys.argv[1:]
    head = _launcher_line()
    if head and head[len(head) - len(words) :] == words:
        line = shlex.join(head[: len(head) - len(words)])
    else:  # rank 0 is on another host than its launcher
        starter = _STARTERS.get(launch_of().by)
        script = os.path.relpath(sys.argv[0], ROOT)
        line = (f"{starter} ... " if starter else "") + shlex.join(["./entry_cn.sh", script])
    logs = folder.path.parent
    place = [] if logs == Path("logs") else ["--logs", str(logs)]
    rest = [*_without_place(words), *place, "--run", folder.path.name, "--resume", "auto"]
    return f"{line} {shlex.join(rest)}"


def _without_place(words: Sequence[str]) -> Iterator[str]:
    """Yield the words that do not say which run it is, or where."""
    is_value = False
    for word in words:
        name, is_joined, _ = word.partition("=")
        if name in _REPLACED:
            is_value = not is_joined
        elif is_value:
            is_value = False
        else:
            yield word


def _launcher_line() -> list[str]:
    """Return the command line of the mpirun that is an ancestor of this process, or nothing."""
    try:
        for parent in psutil.Process().parents():
            if parent.name() in MPIRUN:
                first, *rest = parent.cmdline()
                # Open MPI 5 becomes prterun, Open MPI 4 is a link to orterun.
                return ["mpirun" if Path(first).name.endswith("terun") else first, *rest]
    except psutil.Error:  # of another user's, or gone
        pass
    return []
