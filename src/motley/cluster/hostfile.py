"""Reads and checks ``hosts.txt``, which is a plain Open MPI hostfile.

python -m motley.cluster.hostfile hosts.txt        # print the hosts, or say what is wrong
"""

import argparse
import ipaddress
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from motley.errors import MotleyError

# Names reach ssh and mpirun, so nothing but a real host name may pass: RFC 1123
# labels (an underscore is tolerated, labs use it), which can hold neither a leading
# '-', nor a space, quote, '$' or newline.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_LINE = "name slots=N"
# The words for a number of ranks and for its limit that Open MPI takes beside slots=N.
_COUNTS = ("slots", "cpu", "cpus", "count")
_LIMITS = ("max_slots", "max-slots", "slots_max", "slots-max")
_WORD = re.compile(r"([A-Za-z_-]+)\s*=\s*(\S+)")
_MARK = "\ufeff"
REMOVE_MARKS = r"sed -i '1s/^\xef\xbb\xbf//; s/\r$//'"


@dataclass(frozen=True)
class Host:
    """One machine of the lab.

    Attributes:
        name: host name or address, safe to hand to ssh.
        slots: ranks it takes (GPUs, or CPU ranks on a machine without one).
    """

    name: str
    slots: int = 1


def check_name(name: str) -> str:
    """Return ``name`` if it is a host name or an IP address; raise MotleyError if not."""
    is_number = not name.strip("0123456789.")  # ssh takes 10.0.0.300 for a name, and finds none
    if len(name) <= 253 and _NAME.fullmatch(name) and not is_number:
        return name
    user, at, host = name.partition("@")
    if at and _NAME.fullmatch(user) and _NAME.fullmatch(host):
        raise MotleyError(
            f"{name!r} names a user; write {host} alone, and into ~/.ssh/config: "
            f"Host {host}, and below it: User {user}"
        )
    try:
        if "%" not in name:  # what follows it in an IPv6 address may be anything
            return str(ipaddress.ip_address(name))
        raise ValueError
    except ValueError:
        raise MotleyError(
            f"{name!r} is not a host name: use letters, digits, '-', '.' and '_' "
            "(not first '-'), or an IP address; one host a line"
        ) from None


def parse_hosts(text: str, source: str = "hosts.txt") -> tuple[Host, ...]:
    """Parse the text of a hostfile.

    Args:
        text: lines of ``name slots=N``; ``#`` and ``//`` start a comment, as for mpirun.
        source: how to name the file in errors.

    Raises:
        MotleyError: on the first bad line, a host named twice, or no host at all.
    """
    hosts: dict[str, Host] = {}  # by name in small letters, in which ssh compares them
    # Split at '\n' alone: splitlines() would also split at characters that ssh and
    # mpirun take as part of a name.
    for number, line in enumerate(text.removeprefix(_MARK).split("\n"), start=1):
        plain = re.split(r"#|(?:^|\s)//", line, maxsplit=1)[0].strip()
        if not plain:
            continue
        name, rest = [*plain.split(maxsplit=1), ""][:2]
        try:
            host = Host(check_name(name.removesuffix(".")), _slots(rest, name))
            if host.name.lower() in hosts:
                raise MotleyError(f"host {host.name} is named twice; add up its slots on one line")
        except MotleyError as error:
            raise MotleyError(f"{source}, line {number}: {error}") from None
        hosts[host.name.lower()] = host
    if not hosts:
        raise MotleyError(f"{source} names no host; add one a line, for example: localhost slots=5")
    return tuple(hosts.values())


def read_hosts(path: str | Path) -> tuple[Host, ...]:
    """Read a hostfile; see :func:`parse_hosts`. Print a note on stderr if it has the marks of a
    Windows editor."""
    try:
        text = Path(path).read_bytes().decode()
    except FileNotFoundError:
        raise MotleyError(
            f"{path} does not exist; write one host a line, as hosts.example.txt does: localhost "
            "slots=5"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MotleyError(f"{path} cannot be read: {error}") from None
    if found := foreign_marks(text):
        print(
            f"motley: {path} has {found}, which are left out; other programs refuse the file, so "
            f"remove them with: {REMOVE_MARKS} {shlex.quote(str(path))}",
            file=sys.stderr,
        )
    return parse_hosts(text, str(path))


def foreign_marks(text: str) -> str:
    """Return the name of what a Windows editor has put into a text; empty if there is nothing."""
    marks = (("a byte-order mark", text.startswith(_MARK)), ("Windows line ends", "\r\n" in text))
    return " and ".join(name for name, is_there in marks if is_there)


def _slots(words: str, name: str) -> int:
    """Return the ranks of a line: its slots, else their limit, else 1."""
    numbers: dict[str, int] = {}
    for word, value in _WORD.findall(words):
        if word == "port":
            raise MotleyError(
                f"found {words.strip()!r} after the name; a port goes into ~/.ssh/config: "
                f"Host {name}, and below it: Port {value}"
            )
        kind = "slots" if word in _COUNTS else "limit" if word in _LIMITS else ""
        if kind and re.fullmatch(r"\d{1,9}", value) and kind not in numbers:
            numbers[kind] = int(value)
        else:
            numbers["unknown"] = 0
    if _WORD.sub("", words).strip() or 0 in numbers.values():
        raise MotleyError(f"found {words.strip()!r} after the name; a line is `{_LINE}`, N >= 1")
    return numbers.get("slots", numbers.get("limit", 1))


def main() -> int:
    """Print the hosts of a file, one a line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("hostfile", nargs="?", default="hosts.txt")
    try:
        for host in read_hosts(parser.parse_args().hostfile):
            print(f"{host.name} slots={host.slots}")
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
