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

_ENTRY, _KEEPER = "entry_cn.sh", "keep_training.py"
_REPLACED = ("--run", "--resume", "--logs")
_STARTERS = {Launcher.MPI: "mpirun", Launcher.SLURM: "srun", Launcher.TORCHRUN: "torchrun"}


def make_resume_line(folder: RunFolder) -> str:
    """Return the line that continues this process's run: what the user typed, and ``--resume``."""
    line = _launcher_line()
    names = [Path(word).name for word in line]
    if _ENTRY in names:
        at = names.index(_ENTRY) + 1
        begin, words = shlex.join(line[:at]), line[at:]
    else:  # rank 0 is on another host than its launcher
        starter = _STARTERS.get(launch_of().by)
        begin = f"{starter} ... ./{_ENTRY}" if starter else f"./{_ENTRY}"
        words = [os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]
    logs = folder.path.parent
    place = [] if logs == Path("logs") else ["--logs", str(logs)]
    rest = [*_without_place(words), *place, "--run", folder.path.name, "--resume", "auto"]
    return f"{begin} {shlex.join(rest)}"


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
    """Return the line that the user has typed, of mpirun or keep_training.sh; else nothing."""
    line: list[str] = []
    try:
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            names = [Path(word).name for word in words]
            if _KEEPER in names:  # its mpirun may have a hostfile that is gone afterwards
                return ["bash", "setup/keep_training.sh", *words[names.index(_KEEPER) + 1 :]]
            if parent.name() in MPIRUN and not line:
                # Open MPI 5 becomes prterun, Open MPI 4 is a link to orterun.
                first = "mpirun" if names[0].endswith("terun") else words[0]
                line = [first, *words[1:]]
    except (psutil.Error, IndexError):  # of another user's, or gone
        pass
    return line
