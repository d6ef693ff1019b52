"""Whose daemon of mpirun's went: what setup/launcher/ssh.sh notes when a session to a host fails.

``<cache folder>/lost.<process of mpirun>`` holds ``HOST STATUS``, a line each, the first one first.
"""

import time
from pathlib import Path

from motley.launch.process import cache_folder

_NOTE_S = 2.0  # after a daemon is killed, ssh says so a little later than the daemon's connection


def lost_host(launcher: int, limit_s: float = _NOTE_S) -> str:
    """The host whose daemon went first; empty where none did. The note is removed.

    Args:
        launcher: process of mpirun. limit_s: that it may take to be noted.
    """
    note = _note(launcher)
    deadline = time.monotonic() + limit_s
    while not note.exists():
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.05)
    words = note.read_text(errors="replace").split()
    note.unlink(missing_ok=True)
    return words[0] if words else ""


def _note(launcher: int) -> Path:
    return cache_folder() / f"lost.{launcher}"
