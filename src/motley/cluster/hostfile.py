"""Reads and checks ``hosts.txt``, which is a plain Open MPI hostfile.

python -m motley.cluster.hostfile hosts.txt        # print the hosts, or say what is wrong
"""

import argparse
import ipaddress
import re
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
    if len(name) <= 253 and _NAME.fullmatch(name):
        return name
    try:
        if "%" not in name:  # what follows it in an IPv6 address may be anything
            return str(ipaddress.ip_address(name))
        raise ValueError
    except ValueError:
        raise MotleyError(
            f"{name!r} is not a host name: use letters, digits, '-', '.' and '_' "
            "(not first '-'), or an IP address"
        ) from None


def parse_hosts(text: str, source: str = "hosts.txt") -> tuple[Host, ...]:
    """Parse the text of a hostfile.

    Args:
        text: lines of ``name slots=N``; ``#`` starts a comment.
        source: how to name the file in errors.

    Raises:
        MotleyError: on the first bad line, a host named twice, or no host at all.
    """
    hosts: dict[str, Host] = {}
    # Split at '\n' alone: splitlines() would also split at characters that ssh and
    # mpirun take as part of a name.
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        try:
            host = Host(check_name(words[0]), _slots(words[1:]))
            if host.name in hosts:
                raise MotleyError(f"host {host.name} is named twice; add up its slots on one line")
        except MotleyError as error:
            raise MotleyError(f"{source}, line {number}: {error}") from None
        hosts[host.name] = host
    if not hosts:
        raise MotleyError(f"{source} names no host; add one a line, for example: localhost slots=5")
    return tuple(hosts.values())


def read_hosts(path: str | Path) -> tuple[Host, ...]:
    """Read a hostfile; see :func:`parse_hosts`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MotleyError(
            f"{path} does not exist; write one host a line, for example: localhost slots=5"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MotleyError(f"{path} cannot be read: {error}") from None
    return parse_hosts(text, str(path))


def _slots(words: list[str]) -> int:
    if not words:
        return 1
    match = re.fullmatch(r"slots=(\d{1,5})", words[0])
    if len(words) > 1 or match is None or int(match[1]) < 1:
        raise MotleyError(f"found {' '.join(words)!r} after the name; a line is `{_LINE}`, N >= 1")
    return int(match[1])


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
