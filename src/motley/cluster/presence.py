"""Who else needs this machine now: somebody at its console, or somebody's process on its GPU.

Asked without root:

- systemd-logind, where there is one: a person's session at a local seat that is active, not locked
  and not idle. A desktop says itself when it is idle, and logind says it of a text console; a
  desktop that never says so counts as idle when it is locked, or left.
- Else utmp: a login at a text console (tty1, ...) on which something was typed in the last minutes.
  A graphical login (:0) counts as long as it is there, for nothing says when it is idle.
- NVML: a process of another user's that holds memory of a GPU, as long as it does.

Whoever is logged in by ssh is at no console.
"""

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

import psutil

from motley.cluster.device_facts import user_of
from motley.cluster.gpus import read_gpu_processes

_TYPED_S = 300.0  # at a text console: so long ago is idle
_LIMIT_S = 4.0  # for an answer of logind's
_ASKED = ("Name", "Seat", "Class", "Active", "Remote", "IdleHint", "LockedHint", "Type", "TTY")


def who_is_here() -> str:
    """Somebody else who needs this machine, in words; empty if nobody does."""
    return _at_console() or _on_gpu()


def _at_console() -> str:
    sessions = _ask("list-sessions", "--no-legend")
    if sessions is None:
        return _at_console_by_utmp()
    for line in sessions.splitlines():
        words = line.split()
        told = _ask("show-session", words[0], *(f"-p{name}" for name in _ASKED)) if words else None
        if told and (who := _active(dict(re.findall(r"^(\w+)=(.*)$", told, re.MULTILINE)))):
            return f"{who} is at its console"
    return ""


def _active(session: dict[str, str]) -> str:
    """The name of a session's user, if that is at the machine now."""
    is_person = session.get("Class") == "user" and session.get("Seat")
    here = is_person and session.get("Active") == "yes" and session.get("Remote") == "no"
    idle = "yes" in (session.get("IdleHint"), session.get("LockedHint"))
    return session.get("Name", "?") if here and not idle else ""


def _ask(*words: str) -> str | None:
    """What logind says; None where there is none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["loginctl", "--no-pager", *words], capture_output=True, text=True, check=True,
            timeout=_LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.stdout
    return None


def _at_console_by_utmp() -> str:
    for login in psutil.users():
        terminal = login.terminal or login.host or ""
        if terminal.startswith(":"):
            return f"{login.name} is at its console"
        if re.fullmatch(r"tty\d+", terminal):
            with contextlib.suppress(OSError):
                if time.time() - Path("/dev", terminal).stat().st_atime < _TYPED_S:
                    return f"{login.name} is at its console"
    return ""


def _on_gpu() -> str:
    own = user_of(os.getpid())  # a number where the user has no name
    for process in read_gpu_processes() or ():
        if process.user not in (own, str(os.getuid())):
            return f"a process of {process.user} is on GPU {process.gpu}"
    return ""
