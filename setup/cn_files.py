"""Brings files of this machine to hosts with folders of their own: only what differs."""

import contextlib
import functools
import hashlib
import os
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path

from cn import ROOT

from motley.child import run_child
from motley.cluster.ssh import Remote
from motley.errors import HostTrouble

GIT_LIMIT_S = 30.0

# Never sent, in a repository that git does not know: what each host makes for itself.
_MADE = {".git", ".venv", ".venv-python", "__pycache__", ".pytest_cache", ".mypy_cache",
         ".ruff_cache", ".hypothesis", "motley.egg-info"}  # fmt: skip
_MADE_AT_ROOT = {"logs", "data", "baselines"}  # the library has a room called data

# Prints which of "hash  path" lines from stdin are not so below $1.
_COMPARE = """
cd -- "$1" 2>/dev/null && there=yes || there=
while read -r hash path; do
  set -- $(test -n "$there" && sha256sum -- "$path" 2>/dev/null)
  [ "$1" = "$hash" ] || echo "$path"
done
"""
_UNPACK = 'mkdir -p -- "$1" && cd -- "$1" && tar -xf -'


def tracked_files() -> list[str]:
    """The repository's files, relative to it: what git tracks, else all but what is made."""
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "ls-files", "-z"]
    listed = None
    with contextlib.suppress(OSError):  # a machine without git
        listed = run_child(git, GIT_LIMIT_S, f"see whether the disk of {ROOT} answers")
    if listed is not None and listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
        return [name for name in names if (ROOT / name).is_file()]
    found = []
    for folder, below, names in os.walk(ROOT):
        made = _MADE | (_MADE_AT_ROOT if Path(folder) == ROOT else set())
        below[:] = [name for name in below if name not in made]
        found += [str((Path(folder) / name).relative_to(ROOT)) for name in names]
    return sorted(found)


def differing(remote: Remote, source: Path, names: Iterable[str], target: Path) -> list[str]:
    """Which of the files below ``source`` the host lacks, or has otherwise, below ``target``."""
    listed = "".join(f"{_hash(source / name)} {name}\n" for name in names)
    return remote.run(_COMPARE, target, payload=listed.encode(), limit=600).output.splitlines()


def send(remote: Remote, source: Path, names: Iterable[str], target: Path) -> list[str]:
    """Bring files below ``source`` here to ``target`` there; returns the names of what was sent.

    Cut short, the next call sends what is still missing.
    """
    missing = differing(remote, source, names, target)
    if not missing:
        return []
    with subprocess.Popen(
        ["tar", "-C", source, "-cf", "-", "--null", "-T", "-"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as tar:  # fmt: skip
        assert tar.stdin and tar.stdout
        tar.stdin.write("\0".join(missing).encode())
        tar.stdin.close()
        done = remote.run(_UNPACK, target, payload=tar.stdout, limit=7200)
    if done.code != 0:
        raise HostTrouble(
            "not copied",
            f"{remote.host} could not take the files into {target} ({done.errors.strip()})",
            "free some space, or keep the repository where every host may write, as your home",
        )
    return missing


_hashing = threading.Lock()


def _hash(path: Path) -> str:
    """SHA256 of a file, read once however many hosts it goes to: wheels are gigabytes."""
    with _hashing:
        return _hash_once(path)


@functools.cache
def _hash_once(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
