"""The files that Open MPI keeps on this machine for one job, which a killed launcher leaves."""

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

# sm_segment.HOST.USER.JOB.RANK, of Open MPI 5; 4.1 calls it vader_segment
_SEGMENT = re.compile(r"/dev/shm/((?:sm|vader)_segment\.\S+\.)\d+$", re.MULTILINE)


def segments_of_this_job() -> str:
    """How the names of its shared memory begin, in /dev/shm; empty if it has none.

    A rank maps its own, so they are known without a rule for numbers of jobs.
    """
    with contextlib.suppress(OSError):
        found = _SEGMENT.search(Path("/proc/self/maps").read_text(errors="replace"))
        return found[1] if found else ""
    return ""


def session_folder(launcher: int, environ: Mapping[str, str]) -> str:
    """The launcher's folder for its jobs, which is named by its process; empty if unknown."""
    folder = environ.get("PMIX_SERVER_TMPDIR", "")
    names = (f"/ompi.{launcher}", f"/pid.{launcher}", f"/prted.{launcher}")
    return folder if folder.endswith(names) else ""


def remove(segments: str, session: str) -> None:
    """Remove what is left of a job that has ended; what is another user's is not touched."""
    if segments:
        for path in Path("/dev/shm").glob("*"):
            if path.name.startswith(segments):
                with contextlib.suppress(OSError):
                    if _is_ours(path):
                        path.unlink()
    if session:
        with contextlib.suppress(OSError):
            if _is_ours(Path(session)):
                shutil.rmtree(session, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    return path.lstat().st_uid == os.getuid() and not path.is_symlink()
