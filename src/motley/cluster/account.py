"""The account that this process runs under: its name and its home folder.

A container may run under a user number without a name, and without HOME.
"""

import getpass
import os
import socket
from pathlib import Path

from motley.errors import MotleyError


def home_folder() -> Path:
    """Return the home folder: HOME, or what the list of users has.

    Raises:
        MotleyError: neither tells one.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise MotleyError(
            f"no home folder is known on {socket.gethostname()}: HOME is not set, and the list of "
            f"users has no number {os.getuid()} (getent passwd {os.getuid()}). Set it: "
            "export HOME=/its/path"
        ) from None


def expand_home(path: str) -> Path:
    """Return a path with the home folder in place of a first ``~/``."""
    return home_folder() / path[2:] if path.startswith("~/") else Path(path)


def user_name() -> str:
    """Return the name of the user, or the number of one without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
