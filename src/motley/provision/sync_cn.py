"""Copy this repository's files to every host of hosts.txt.

A host that shares this folder, as by NFS, gets no files.

  bash setup/sync_cn.sh
  bash setup/sync_cn.sh --dry-run         # prints which files differ, and where
  bash setup/sync_cn.sh --hostfile my_hosts.txt

The files that git tracks are sent to the same path, if they differ on the host. Files that only the
host has stay. An edit of a tracked file on a host is overwritten.

Options:
  --hostfile FILE   default: the repository's hosts.txt (command motley: the current folder's)
  --dry-run         print every change, do none

Exit status: 0 all hosts have the same files, 1 some host does not, 2 nothing was
begun.
"""

import contextlib
import functools
import hashlib
import os
import subprocess
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from motley.cluster.processes import run_child
from motley.cluster.ssh import Remote, connect, split
from motley.errors import HostTrouble
from motley.provision.host_report import probe, token_file
from motley.provision.setup_command import (
    PLACE,
    Parser,
    ask_all,
    many,
    print_troubles,
    read_hostfile,
    run,
    table,
)

GIT_LIMIT_S = 30.0

# Files that each host makes for itself. They are not sent if git cannot list the files.
_MADE = {".git", ".venv", ".venv-python", "__pycache__", ".pytest_cache", ".mypy_cache",
         ".ruff_cache", ".hypothesis", "motley.egg-info"}  # fmt: skip
_MADE_AT_ROOT = {"logs", "data", "baselines"}  # the library has a room called data

# Reads "hash  path" lines from stdin, and prints the paths below $1 with another hash.
_COMPARE = """
cd -- "$1" 2>/dev/null && there=yes || there=
while read -r hash path; do
  set -- $(test -n "$there" && sha256sum -- "$path" 2>/dev/null)
  [ "$1" = "$hash" ] || echo "$path"
done
"""
_UNPACK = 'mkdir -p -- "$1" && cd -- "$1" && tar -xf -'


def tracked_files() -> list[str]:
    """Return the files to send, as paths in the repository: hosts.txt and the tracked files.

    Without git, return all files except generated files.
    """
    git = ["git", "-c", f"safe.directory={PLACE}", "-C", str(PLACE), "ls-files", "-z"]
    listed = None
    with contextlib.suppress(OSError):  # a machine without git
        listed = run_child(git, GIT_LIMIT_S, f"see whether the disk of {PLACE} answers")
    if listed is not None and listed.returncode == 0:
        listing = dict.fromkeys([*listed.stdout.split("\0"), "hosts.txt"])
        return [name for name in listing if name and (PLACE / name).is_file()]
    result = []
    for folder, below, names in os.walk(PLACE):
        made = _MADE | (_MADE_AT_ROOT if Path(folder) == PLACE else set())
        below[:] = [name for name in below if name not in made]
        result += [str((Path(folder) / name).relative_to(PLACE)) for name in names]
    return sorted(result)


def differing(remote: Remote, source: Path, names: Iterable[str], target: Path) -> list[str]:
    """Return the files of ``source`` that are missing or different in ``target`` on the host."""
    listed = "".join(f"{_hash(source / name)} {name}\n" for name in names)
    return remote.run(_COMPARE, target, payload=listed.encode(), limit=600).output.splitlines()


def send(remote: Remote, source: Path, names: Iterable[str], target: Path) -> list[str]:
    """Send files of the folder ``source`` to ``target`` on a host; return the sent names.

    Only missing or different files are sent. After an interruption, the next call sends the rest.
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
            f"{remote.host} could not store the files in {target} ({done.errors.strip()})",
            "free some space there, or keep the repository in a folder that you can write to on "
            "every host, such as your home",
        )
    return missing


_hashing = threading.Lock()


def _hash(path: Path) -> str:
    """Return the SHA-256 of a file. The result is cached, since a wheel may have gigabytes."""
    with _hashing:
        return _hash_once(path)


@functools.cache
def _hash_once(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


LIMIT_S = 600


def main(words: Sequence[str]) -> int:
    """Send the files that differ. Return 1 if some host could not be updated, else 0."""
    instead = "copy files of your own to the same path on all hosts with scp"
    options = Parser("sync_cn", __doc__, instead=instead).read(words)
    names = tracked_files()

    def one(host: str) -> str:
        with connect(host) as remote:
            if probe(remote, token=token).same_folder:
                return "this machine" if remote.here else "shares this folder"
            if options.dry_run:
                missing = differing(remote, PLACE, names, PLACE)
                return f"would send {_count(missing)}" if missing else "already the same"
            sent = send(remote, PLACE, names, PLACE)
            return f"sent {_count(sent)}" if sent else "already the same"

    with token_file() as token:
        result = ask_all([host.name for host in read_hostfile(options)], one, LIMIT_S)
    troubles = split(result)[1]
    rows = [(h, each.kind if isinstance(each, HostTrouble) else each) for h, each in result.items()]
    print(table(("host", f"files of {PLACE}"), rows))
    print_troubles(troubles)
    return 1 if troubles else 0


def _count(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return many(len(names), "file") + (f": {shown}" if len(names) <= 3 else f": {shown}, ...")


if __name__ == "__main__":
    run(main)
