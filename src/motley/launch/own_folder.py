"""A folder that this user alone can write to, on a disk that others may see.

What belongs to another user, or can be written by one, is refused; links are not followed. What is
checked is what is opened: it cannot be changed for something else in between.
"""

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path


class RefusedError(OSError):
    """Somebody else could have written it."""


@contextlib.contextmanager
def own_folder(path: Path) -> Iterator[int]:
    """Its descriptor, for the functions here; RefusedError if it is not this user's alone."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check(folder)
        yield folder
    finally:
        os.close(folder)


def open_own(folder: int, name: str) -> io.BufferedReader:
    """Open a file to read it; RefusedError if it is not this user's alone."""
    file = os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb")
    try:
        _check(file.fileno())
    except BaseException:
        file.close()
        raise
    return file


def create(folder: int, name: str) -> io.BufferedRandom:
    """Open a new file, or an empty one in place of what was there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    return os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "w+b")


def _check(opened: int) -> None:
    found = os.fstat(opened)
    if found.st_uid != os.getuid():
        raise RefusedError(errno.EPERM, f"it belongs to the user of number {found.st_uid}")
    if found.st_mode & 0o022:
        raise RefusedError(errno.EPERM, "other users can write to it")
