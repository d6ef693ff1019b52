"""The account of this process: its user name, its home folder, and folders of its own.

One of these folders is the cache, in which this machine stores measured speeds and compiled code.

A container may run under a user number without a name, and without HOME.

The module refuses a folder that belongs to another user, or that another user can write to. Links
are not followed. A folder is opened before the checks, so that no other process can replace the
folder in between.
"""

import contextlib
import errno
import getpass
import io
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from motley.errors import MotleyError


def home_folder() -> Path:
    """Return this user's home: the value of HOME, or the home in the system's list of users.

    Raises:
        MotleyError: neither HOME nor the list of users names a home.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise MotleyError(
            f"your home folder on {socket.gethostname()} is unknown: HOME is not set, and the "
            "system's list of users does not have your user number (getent passwd "
            f"{os.getuid()}). Set it with: export HOME=/its/path"
        ) from None


def expand_home(path: str) -> Path:
    """Return a path in which the home folder replaces a leading ``~/``."""
    return home_folder() / path[2:] if path.startswith("~/") else Path(path)


def user_name() -> str:
    """Return this user's name, or the user id if the user has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class RefusedError(OSError):
    """An error because another user could have written this file or folder."""


@contextlib.contextmanager
def own_folder(path: Path) -> Iterator[int]:
    """Open a folder and yield its descriptor.

    Raises:
        RefusedError: the folder is not this user's, or others can write to it.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check(folder)
        yield folder
    finally:
        os.close(folder)


def open_own(folder: int, name: str) -> io.BufferedReader:
    """Open a file in an open folder for reading.

    Raises:
        RefusedError: the file is not this user's, or others can write to it.
    """
    file = os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb")
    try:
        _check(file.fileno())
    except BaseException:
        file.close()
        raise
    return file


def create(folder: int, name: str) -> io.BufferedRandom:
    """Open a new, empty file in an open folder; an existing file is emptied."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    return os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "w+b")


def _check(opened: int) -> None:
    result = os.fstat(opened)
    if result.st_uid != os.getuid():
        raise RefusedError(errno.EPERM, f"it belongs to the user of number {result.st_uid}")
    if result.st_mode & 0o022:
        raise RefusedError(errno.EPERM, "other users can write to it")


SPEED_FILES = "speed-*.json"  # in cache_folder(): see motley.measure.speed_cache

_OTHERS = ("/tmp", "/var/tmp")  # used if compiled code cannot be loaded from TMPDIR
_NAMES = 8  # names that are tried, in case another user owns the usual one
_LEAST_BYTES, _LEAST_FILES = 4 * 2**20, 16  # free bytes and files that MPI needs for a start


def cache_folder() -> Path:
    """Return a folder of this machine that no other user can write to.

    All processes of this user get the same folder, if the user can own a folder in the system's
    temporary folder.

    Raises:
        MotleyError: this process can write to no temporary folder.
    """
    for place in _places():
        for folder in _candidates(place):
            with contextlib.suppress(FileExistsError):
                try:
                    folder.mkdir(mode=0o700)
                except PermissionError:
                    break
            if _why_not_own(folder) is None:
                return folder
    return _own_for_once()


def is_lasting(folder: Path) -> bool:
    """Return True if a later process of this user gets the same cache folder."""
    return any(folder in _candidates(place) for place in _places())


def cache_note() -> str:
    """Return a sentence that explains why caches are not in the usual folder; empty if they are."""
    usual, taken = next(_candidates(Path(_temporary()))), cache_folder()
    if usual == taken:
        return ""
    if _why_unfit(usual.parent):
        why: str | None = f"no program can be run from {usual.parent}"
    else:
        why = _why_not_own(usual) if usual.exists() else "it cannot be made"
    return (
        f"{usual} on {socket.gethostname()} cannot keep caches: {why}. The caches are in {taken} "
        "for now; correct that, or set TMPDIR to another folder"
    )


def temporary_note(environ: Mapping[str, str]) -> str:
    """Return a warning if MPI's folder for temporary files is full or unusable; else "".

    Args:
        environ: environment of this process, whose TMPDIR counts.
    """
    place = environ.get("TMPDIR") or "/tmp"
    named = f"TMPDIR={place}" if environ.get("TMPDIR") else place
    host = socket.gethostname()
    fix = "or name another folder: export TMPDIR=/var/tmp, and mpirun -x TMPDIR"
    try:
        result = os.statvfs(place)
    except OSError as error:
        return f"{named} on {host} cannot be used: {error.strerror}; create it, {fix}"
    if result.f_bavail * result.f_frsize < _LEAST_BYTES:
        remaining = result.f_bavail * result.f_frsize // 1024
        return (
            f"{named} on {host} is full ({remaining} KiB are free), and MPI keeps files in it; "
            f"free some space, {fix}"
        )
    if result.f_files and result.f_favail < _LEAST_FILES:
        return (
            f"{named} on {host} has inodes for only {result.f_favail} more files, and MPI "
            f"creates files in it; remove small files (df -i, du --inodes), {fix}"
        )
    return ""


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise MotleyError(
            f"no temporary folder on {socket.gethostname()} can be written to (TMPDIR, /tmp, "
            "/var/tmp); free some space or files there (df -h, df -i), or set TMPDIR to another "
            "folder"
        ) from None


def _places() -> list[Path]:
    """Return the folders that may contain the cache folder, the best one first."""
    usual = Path(_temporary())
    fit = [Path(place) for place in (str(usual), *_OTHERS) if not _why_unfit(Path(place))]
    return [*dict.fromkeys(fit)] or [usual]


def _why_unfit(place: Path) -> bool:
    """Return True if a folder is missing, or the system refuses to load compiled code from it."""
    try:
        return bool(os.statvfs(place).f_flag & os.ST_NOEXEC)
    except OSError:
        return True


def _candidates(place: Path) -> Iterator[Path]:
    """Yield the paths that the cache folder may have in ``place``, the usual one first."""
    usual = f"motley-{os.getuid()}"
    yield place / usual
    yield from (place / f"{usual}.{number}" for number in range(1, _NAMES))


def _why_not_own(folder: Path) -> str | None:
    """Return the reason why a folder does not belong to this user alone; None if it does."""
    result = folder.lstat()
    if folder.is_symlink():
        return "it is a symbolic link"
    if result.st_uid != os.getuid():
        return f"it belongs to the user of number {result.st_uid}"
    if result.st_mode & 0o077:
        return "other users can read or write it"
    return None


@cache
def _own_for_once() -> Path:
    return Path(tempfile.mkdtemp(prefix="motley-"))
