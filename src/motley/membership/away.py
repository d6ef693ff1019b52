"""A file that marks a machine as away: the machine takes part in no training for now.

A Motley user sets the mark by a command. With ``--polite``, Motley sets the mark while another user
is at the machine's console, or runs a process on its GPU.

The file is in a folder of this user's on this machine, outside of any run. The mark holds for all
runs of this user:

    /tmp/motley-1000/away.ecetesla1.json
    {"since": 1763693554.1, "until": 1763700754.1, "polite": "", "boot": "0c5e..."}

A mark is valid until its time is over, setup/join_cn.sh removes it, or the machine reboots. A file
is ignored unless this user owns it and no other user may write to it. Symbolic links are not
followed.
"""

import contextlib
import json
import os
import re
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from motley.cluster.gpus import get_process_user, read_gpu_processes
from motley.errors import MotleyError
from motley.text import typed_command

_TYPED_S = 300.0  # a text console is idle once nothing was typed for this time
_LIMIT_S = 4.0  # seconds in which logind has to answer
_ASKED = ("Name", "Seat", "Class", "Active", "Remote", "IdleHint", "LockedHint", "Type", "TTY")


def find_other_user() -> str:
    """Return a phrase that names another user who needs this machine; empty if no user does."""
    return _at_console() or _on_gpu()


def _at_console() -> str:
    sessions = _ask("list-sessions", "--no-legend")
    if sessions is None:
        return _at_console_by_utmp()
    for line in sessions.splitlines():
        words = line.split()
        answer = (
            _ask("show-session", words[0], *(f"-p{name}" for name in _ASKED)) if words else None
        )
        if answer and (who := _active(dict(re.findall(r"^(\w+)=(.*)$", answer, re.MULTILINE)))):
            return f"{who} is at its console"
    return ""


def _active(session: dict[str, str]) -> str:
    """Return the user of a login session if the user is at the machine now, else ""."""
    is_person = session.get("Class") == "user" and session.get("Seat")
    here = is_person and session.get("Active") == "yes" and session.get("Remote") == "no"
    idle = "yes" in (session.get("IdleHint"), session.get("LockedHint"))
    return session.get("Name", "?") if here and not idle else ""


def _ask(*words: str) -> str | None:
    """Return the output of ``loginctl`` with these arguments; None if it fails or is missing."""
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
    own = get_process_user(os.getpid())  # a number where the user has no name
    for process in read_gpu_processes() or ():
        if process.user not in (own, str(os.getuid())):
            return f"a process of {process.user} is on GPU {process.gpu}"
    return ""


_PARENT = Path("/tmp")  # not TMPDIR, which may differ between a login by ssh and a rank
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Away:
    """The mark that keeps a machine out of all training, with its reason and its end.

    Attributes:
        since: start of the mark, in seconds since 1970, by the machine's own clock.
        until: end of the mark, in seconds since 1970, by the same clock; None: no end.
        polite: phrase that names the other user, if the machine left automatically. Empty if a
            command of this user's set the mark.
        boot: identity of the boot in which the mark was set.
    """

    since: float
    until: float | None = None
    polite: str = ""
    boot: str = ""

    def words(self) -> str:
        """Return the end of a sentence that begins with the host's name.

        An example is "leaves as asked (leave_cn.sh, until 14:20)".
        """
        if self.polite:
            return f"gives way ({self.polite})"
        return f"leaves as asked ({typed_command('leave_cn.sh')}{self.until_words()})"

    def until_words(self) -> str:
        """Return the time at which the mark ends, such as ", until 14:20"; empty without an end."""
        if self.until is None:
            return ""
        day = "" if _day(self.until) == _day(self.since) else "%b %d "
        return ", until " + time.strftime(f"{day}%H:%M", time.localtime(self.until))


def read_away() -> Away | None:
    """Return this machine's mark of absence; None if no valid mark exists or can be read."""
    with contextlib.suppress(FileNotFoundError, MotleyError), _folder(make=False) as folder:
        result = _read(folder)
        over = result.until is not None and result.until <= time.time()
        if result.boot == _boot() and not over:
            return result
    return None


def mark_away(seconds: float | None, polite: str = "") -> Away:
    """Mark this machine as away, in place of an earlier mark, and return the new mark.

    Args:
        seconds: duration of the mark; None: no end.
        polite: see :class:`Away`.

    Raises:
        MotleyError: this user does not own the folder, or others may write to it.
    """
    now = time.time()
    away = Away(now, None if seconds is None else now + seconds, polite, _boot())
    new = f".{_name()}.{os.getpid()}"
    with _folder(make=True) as folder:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new, dir_fd=folder)
            with os.fdopen(os.open(new, flags, 0o600, dir_fd=folder), "w") as file:
                json.dump(asdict(away), file)
            os.rename(new, _name(), src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            raise MotleyError(
                f"cannot write {_path() / _name()}: {error.strerror}; check that disk"
            ) from None
    return away


def remove_mark() -> None:
    """Remove this machine's mark of absence, if any. The machine then takes part again."""
    with contextlib.suppress(FileNotFoundError), _folder(make=False) as folder:
        os.unlink(_name(), dir_fd=folder)


def _path() -> Path:
    return _PARENT / f"motley-{os.getuid()}"


def _name() -> str:
    return f"away.{os.uname().nodename}.json"  # several machines may share a /tmp


@contextlib.contextmanager
def _folder(make: bool) -> Iterator[int]:
    """Open the folder of the mark file, and yield the folder's descriptor.

    Args:
        make: True: create the folder if it is missing.

    Raises:
        FileNotFoundError: the folder does not exist.
        MotleyError: this user does not own the folder, or others may write to it.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            _path().mkdir(mode=0o700)
    try:
        folder = os.open(_path(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, or another user's file
        raise _not_ours(error.strerror or "cannot be opened") from None
    try:
        _check(folder)
        yield folder
    finally:
        os.close(folder)


def _check(opened: int) -> None:
    """Raise MotleyError unless this user owns a file or folder that no other user may write to."""
    result = os.fstat(opened)
    if result.st_uid != os.getuid():
        raise _not_ours(f"user {result.st_uid} owns it")
    if result.st_mode & 0o022:
        raise _not_ours(f"other users may write to it (mode {stat.S_IMODE(result.st_mode):o})")


def _not_ours(found: str) -> MotleyError:
    return MotleyError(
        f"{_path()} must be your own folder, which no other user can write to ({found}); remove "
        f"it, or ask its owner to, and create it with: mkdir -m 700 {_path()}"
    )


def _read(folder: int) -> Away:
    """Read the mark file in an open folder.

    Raises:
        FileNotFoundError: the mark file does not exist.
        MotleyError: the file is damaged, or other users may write to it.
    """
    try:
        opened = os.open(_name(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _not_ours(f"{_name()}: {error.strerror}") from None
    with os.fdopen(opened, "rb") as file:
        _check(opened)
        try:
            text = json.loads(file.read(_MOST_BYTES))
            until = text["until"]
            return Away(
                float(text["since"]), None if until is None else float(until),
                str(text["polite"]), str(text["boot"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, OSError, RecursionError):
            raise MotleyError(f"{_path() / _name()} is damaged; remove it") from None


def _boot() -> str:
    """Return the identity of this machine's last boot; empty if the kernel provides none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _day(seconds: float) -> tuple[int, int]:
    day = time.localtime(seconds)
    return day.tm_year, day.tm_yday
