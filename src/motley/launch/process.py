"""Settings of this process: its rank, its parent's death, caches, open files, and its exit."""

import atexit
import contextlib
import ctypes
import os
import platform
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from motley.cluster.account import cache_folder, is_lasting
from motley.cluster.launcher import read_launch
from motley.errors import MotleyError
from motley.text import typed_command

_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent ends
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1  # mallopt(3)

# Caches that programs keep by default under $HOME, or where others can write. On a network home
# such caches are slow, and all nodes would write the same files. Each node gets its own instead.
_COMPILED = {
    "TORCH_EXTENSIONS_DIR": "torch_extensions",  # DeepSpeed's
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "MIOPEN_USER_DB_PATH": "miopen/found",
    "MIOPEN_CUSTOM_CACHE_DIR": "miopen/kernels",
}
_CACHES = {**_COMPILED, "MPLCONFIGDIR": "matplotlib"}

# Files that a rank has open besides connections: libraries, loader processes, shards of data.
_LEAST_FILES, _USUAL_FILES = 64, 1024
_GROUPS = 4  # process groups, in each of which gloo connects all pairs of ranks

_FIRST_SAYS_S = 3.0  # seconds by which rank 0 may start later; mpirun ends all ranks once one exits


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank from the launcher's variables; 0 without a launcher."""
    return read_launch(environ).rank


def launched_local_rank(found: int, environ: Mapping[str, str]) -> int:
    """Return the rank on this machine as the launcher numbers it.

    The launcher's local numbers may be in another order than the ranks. DeepSpeed refuses a
    LOCAL_RANK that differs from Open MPI's.

    Args:
        found: position of this rank among the ranks of this machine, which is returned if the
            launcher gives no number.
        environ: environment of this process.
    """
    local_rank = read_launch(environ).local_rank
    return found if local_rank is None else local_rank


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent process ends.

    Args:
        number: number of the signal; 0: send no signal from now on.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def keep_freed_memory(size: int) -> None:
    """Make malloc keep up to ``size`` freed bytes for reuse.

    By default, malloc requests new pages for each large block, and the kernel sets them to zero
    each time.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, size)


def allow_files(ranks: int, first: bool) -> None:
    """Raise the limit of open files to what a job of this size may need.

    Args:
        ranks: number of ranks of the job.
        first: True on rank 0, which has a connection to every other rank.

    Raises:
        MotleyError: the system's limit is too low for rank 0.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    needed, enough = ranks + _LEAST_FILES, _GROUPS * ranks + _USUAL_FILES
    if soft != resource.RLIM_INFINITY and soft < enough:
        with contextlib.suppress(ValueError, OSError):  # the kernel's fs.nr_open is less
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(enough, most), hard))
            soft = min(enough, most)
        if first and soft < needed:
            raise MotleyError(
                f"a job of {ranks} ranks needs {needed} open files on its first host, "
                f"{socket.gethostname()}, which allows {soft} (ulimit -Hn). Raise nofile in "
                "/etc/security/limits.conf there, or LimitNOFILE of the service that starts the "
                "job (ssh, slurmd), and log in again"
            )


def keep_caches_local(environ: Any) -> None:
    """Set the variables that locate caches to folders below :func:`cache_folder`.

    Call this before torch is imported, since torch then sets inductor's folder.

    Args:
        environ: environment variables, which are changed. Variables that are set already stay.
    """
    folder = cache_folder()
    for name, below in _CACHES.items():
        environ.setdefault(name, str(folder / below))


def compiled_below(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders below :func:`cache_folder` in which compilers store their results.

    Caches that the user has placed elsewhere are left out. The tuple is empty if the cache folder
    does not outlive this run.
    """
    folder = cache_folder()
    if not is_lasting(folder):
        return ()
    named = {below: environ.get(name) for name, below in _COMPILED.items()}
    return tuple(below for below, path in named.items() if path == str(folder / below))


def stop_usage(message: str) -> NoReturn:
    """Print an error in the command line on rank 0, and exit all ranks with status 2.

    All ranks call this function, because all ranks read the same command line. Ranks other than 0
    first wait a short time, in which the launcher ends them. A rank that the launcher has not ended
    prints its own error, such as a file that is missing on its host.
    """
    rank, where = launched_rank(), ""
    if rank:
        time.sleep(_FIRST_SAYS_S)
        where = f"rank {rank} on {platform.node()}: "
    print(f"motley: {where}{typed_command(message)}", file=sys.stderr, flush=True)
    sys.exit(2)


def end_at_once(finalize: Callable[[], None]) -> NoReturn:
    """End this process with status 0, without destroying its modules.

    Before the end, threads are joined and the functions of atexit are called. Destroying the
    modules of torch and timm would take more than a second of processor time.

    Args:
        finalize: function that is called after the functions of atexit.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone
            stream.flush()
    os._exit(0)
