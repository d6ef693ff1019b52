"""Who writes to a folder: a lock that the kernel drops when its process ends, however it ends.

It is flock(2) on the file ``.lock``, which says who holds it. NFS passes such locks on to its
server, so all hosts see them; where a disk is mounted without locks (Lustre without ``flock``,
BeeGFS by default) they are not known on other hosts, or at all.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from motley.errors import MotleyError

_FILE = ".lock"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # other errors: this disk has no locks
_TRIES, _BETWEEN_S = 10, 0.02  # whoever looks whether a lock is free holds it for a moment


def take_folder(folder: Path, busy: str, then: str, name: str = _FILE) -> TextIO:
    """Take a folder for this process; the lock goes when the returned file is closed.

    Args:
        busy: what to say where another process has it; followed by who and since when.
        then: what to do.
        name: of the file, where something in the folder is taken, not all of it.
    """
    file = (folder / name).open("a+")
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in _HELD:
                break
            if not left:
                who = _owner(file)
                file.close()
                raise MotleyError(f"{busy}{who}; {then}") from None
            time.sleep(_BETWEEN_S)
    own = {"host": os.uname().nodename, "pid": os.getpid(), "since": time.time()}
    with contextlib.suppress(OSError):  # of a full disk: it is locked all the same
        file.truncate(0)
        file.write(json.dumps(own))
        file.flush()
    return file


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process is in here with this file; a disk without locks lets all in."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _owner(file: TextIO) -> str:
    """As in ", by process 714 on ecetesla0 since 2026-11-24 20:18:15"; empty if it is not known."""
    try:
        file.seek(0)
        said = json.loads(file.read(1000))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(said["since"]))
        return f", by process {int(said['pid'])} on {said['host']} since {since}"
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return ""


def refuse_link(folder: Path) -> None:
    """Raise MotleyError where a run's folder leads elsewhere: to another run's records, say."""
    if folder.is_symlink():
        raise MotleyError(
            f"the run folder {folder} is a symbolic link, to {folder.resolve()}; name that one by "
            "--logs DIR and --run NAME, or by --resume PATH"
        )


def is_free(folder: Path) -> bool:
    """Whether surely no living process has taken a folder."""
    try:
        with (folder / _FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # it is held, or nobody can tell
        return False
    return True
