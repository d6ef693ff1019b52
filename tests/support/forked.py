"""Scripts in forks of the process that tests: of all they import, nothing is imported twice.

A fork has arguments, output, signals and an exit status of its own, as a Python that was started
has, and begins at once. What threads of this process did goes on in none.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import IO

from project import ROOT
from warm.fork import end_with

_LIMIT_S = 120


def run_script(
    script: str, *words: object, variables: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """As ``python SCRIPT WORDS...`` in the repository's root.

    Args:
        variables: all of its environment.
    """

    def body() -> None:
        os.chdir(ROOT)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv = [script, *map(str, words)]
        sys.path.insert(0, str((ROOT / script).parent))
        runpy.run_path(script, run_name="__main__")

    return run_fork(body)


def run_fork(body: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """Call ``body`` in a fork; it ends as a Python would that ran it, or after two minutes."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            end_with(lambda: _own(body, out, err))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess((), code, out.read(), err.read())


def _own(body: Callable[[], object], out: IO[str], err: IO[str]) -> None:
    for number, file in ((1, out), (2, err)):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    signal.alarm(_LIMIT_S)
    # What pytest has collected is said here, and only what a Python says by itself.
    warnings.showwarning = lambda *said, **_: print(*said, file=sys.stderr)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # OpenMP's are not there, and are waited for
    body()
