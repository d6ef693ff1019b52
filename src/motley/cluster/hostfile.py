"""The hosts of a job, from a hostfile or from Slurm's allocation.

The hostfile is ``hosts.txt``, a plain Open MPI hostfile.

python -m motley.cluster.hostfile hosts.txt        # print the hosts, or the error in the file

The allocation is read from environment variables alone, since a container has no ``scontrol``.
"""

import argparse
import ipaddress
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from motley import ROOT
from motley.errors import MotleyError
from motley.text import typed_command

# Names are passed to ssh and mpirun, so only real host names are accepted. These are RFC 1123
# labels, and an underscore, which labs use. They contain neither a leading '-', nor a space,
# quote, '$' or newline.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_LINE = "name slots=N"
# Words that Open MPI accepts for the number of ranks (slots=N), and for its limit.
_COUNTS = ("slots", "cpu", "cpus", "count")
_LIMITS = ("max_slots", "max-slots", "slots_max", "slots-max")
_WORD = re.compile(r"([A-Za-z_-]+)\s*=\s*(\S+)")
_MARK = "\ufeff"
REMOVE_MARKS = r"sed -i '1s/^\xef\xbb\xbf//; s/\r$//'"


@dataclass(frozen=True)
class Host:
    """A machine that a hostfile lists.

    Attributes:
        name: host name or address, safe to pass to ssh.
        slots: number of ranks to start on the machine, usually one per GPU.
    """

    name: str
    slots: int = 1


def check_name(name: str) -> str:
    """Return ``name`` if it is a host name or an IP address; raise MotleyError if not."""
    is_number = not name.strip("0123456789.")  # ssh would look up 10.0.0.300 as a name
    if len(name) <= 253 and _NAME.fullmatch(name) and not is_number:
        return name
    user, at, host = name.partition("@")
    if at and _NAME.fullmatch(user) and _NAME.fullmatch(host):
        raise MotleyError(
            f"{name!r} names a user; write {host} alone here, and these two lines into "
            f"~/.ssh/config: Host {host}, then User {user}"
        )
    try:
        if "%" not in name:  # any text may follow it in an IPv6 address
            return str(ipaddress.ip_address(name))
        raise ValueError
    except ValueError:
        raise MotleyError(
            f"{name!r} is not a host name; write one host per line, by its IP address or by a "
            "name of letters, digits, '-', '.' and '_' that does not begin with '-'"
        ) from None


def parse_hosts(text: str, source: str = "hosts.txt") -> tuple[Host, ...]:
    """Return the hosts in the text of a hostfile.

    Args:
        text: lines of ``name slots=N``; ``#`` and ``//`` start a comment, as for mpirun.
        source: name of the file in errors.

    Raises:
        MotleyError: a line is wrong, a host is named twice, or no host is named.
    """
    hosts: dict[str, Host] = {}  # by name in lower case, as ssh compares names
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
        raise MotleyError(
            f"{source} names no host; write one host per line, as in: localhost slots=5"
        )
    return tuple(hosts.values())


def read_hosts(path: str | Path) -> tuple[Host, ...]:
    """Return the hosts of a hostfile; see :func:`parse_hosts`.

    If the file has carriage returns or a byte-order mark of a Windows editor, print a note on
    stderr.

    Raises:
        MotleyError: the file cannot be read, or has an error.
    """
    try:
        text = Path(path).read_bytes().decode()
    except FileNotFoundError:
        to = shlex.quote(str(path))
        example = (
            f"hosts.example.txt does: cp {ROOT}/hosts.example.txt {to}" if ROOT else
            f"in: echo localhost slots=2 >{to}"
        )  # fmt: skip
        raise MotleyError(
            f"{path} does not exist; create it with one host per line, as {example}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MotleyError(f"{path} cannot be read: {error}") from None
    if result := foreign_marks(text):
        print(
            f"motley: {path} has {result}, which Motley ignores and other programs refuse; "
            f"remove them with: {REMOVE_MARKS} {shlex.quote(str(path))}",
            file=sys.stderr,
        )
    return parse_hosts(text, str(path))


def foreign_marks(text: str) -> str:
    """Return a phrase that names the marks of a Windows editor in a text; empty without marks."""
    marks = (("a byte-order mark", text.startswith(_MARK)), ("Windows line ends", "\r\n" in text))
    return " and ".join(name for name, is_there in marks if is_there)


def _slots(words: str, name: str) -> int:
    """Return the number of ranks in a line: ``slots``, else ``max_slots``, else 1.

    Args:
        words: text behind the host's name.
        name: the host's name.

    Raises:
        MotleyError: the text has another form than ``slots=N``.
    """
    numbers: dict[str, int] = {}
    for word, value in _WORD.findall(words):
        if word == "port":
            raise MotleyError(
                f"found {words.strip()!r} after the name, which looks like a port; write these "
                f"two lines into ~/.ssh/config instead: Host {name}, then Port {value}"
            )
        kind = "slots" if word in _COUNTS else "limit" if word in _LIMITS else ""
        if kind and re.fullmatch(r"\d{1,9}", value) and kind not in numbers:
            numbers[kind] = int(value)
        else:
            numbers["unknown"] = 0
    if _WORD.sub("", words).strip() or 0 in numbers.values():
        raise MotleyError(
            f"found {words.strip()!r} after the name; write a line as `{_LINE}`, with N of 1 or "
            "more"
        )
    return numbers.get("slots", numbers.get("limit", 1))


def main() -> int:
    """Print the hosts of a file, one per line, and return the exit code."""
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


_MOST = 100_000  # nodes; a longer list is refused
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodes(names: str) -> list[str]:
    """Return the nodes of a list in Slurm's notation, such as ``n[1-3,07],gpu-a[1-2]``, in order.

    Raises:
        MotleyError: the text is not in Slurm's notation, or a name is no host name.
    """
    result: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", names):
        parts, at = list[list[str]](), 0
        for match in _PART.finditer(item):
            if match.start() != at:
                break
            inside, plain = match.groups()
            parts.append([plain] if inside is None else list(_numbers(inside, names)))
            at = match.end()
        if at != len(item):
            raise MotleyError(f"{names!r} is not a list of Slurm's nodes, such as n[1-3],gpu07")
        result += [check_name("".join(each)) for each in product(*parts)]
        if len(result) > _MOST:
            raise MotleyError(f"{names!r} names more than {_MOST:,} nodes")
    return result


def _numbers(ranges: str, names: str) -> Iterator[str]:
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _MOST:
            raise MotleyError(
                f"{names!r} is not a list of Slurm's nodes, because {each!r} is not a range"
            )
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def allocated_nodes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the nodes that Slurm has allocated to this job; empty outside of an allocation."""
    names = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    return expand_nodes(names) if environ.get("SLURM_JOB_ID") else []


def idle_nodes(machines: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return a hint if ranks run on fewer machines than Slurm has allocated; else an empty string.

    Args:
        machines: number of machines with ranks.
        environ: environment of this process.
    """
    try:
        nodes = allocated_nodes(environ)
    except MotleyError:
        return ""  # code that needs the nodes raises the error
    if len(nodes) <= machines:
        return ""
    return typed_command(
        f"Slurm has allocated {len(nodes)} nodes, and ranks run on {machines} of them; start the "
        f"job with srun --mpi=none --nodes={len(nodes)} --ntasks-per-node=1 ./entry_cn.sh (or as "
        "many tasks per node as a node has GPUs)"
    )


def srun_words(mpi: str = "none") -> list[str]:
    """Return the words of an srun command that starts a rank in each task slot.

    With "none", the ranks connect to each other without Slurm's help. Slurm then does not end the
    other ranks when one rank ends.

    Args:
        mpi: value of srun's option ``--mpi``.
    """
    return ["srun", f"--mpi={mpi}", "--kill-on-bad-exit=0"]


def on_node(node: str) -> list[str]:
    """Return the words of an srun command on an allocated node, beside the running job."""
    return [
        "srun", "--overlap", "--mpi=none", "--quiet", "--nodes=1", "--ntasks=1",
        "--ntasks-per-node=1", f"--nodelist={node}",
    ]  # fmt: skip


# Name (with a star for the default one), state, longest and default time, nodes, cores, GPUs.
_FORMAT = "%R|%P|%a|%l|%L|%D|%c|%G"
_ASK_S = 20.0
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_GPUS = re.compile(r"gpu:(?:[^:,()]+:)?(\d+)")


@dataclass(frozen=True)
class Partition:
    """A group of nodes of a Slurm cluster.

    Attributes:
        name: name of the partition.
        usual: True for the default partition.
        up: True if jobs can start on its nodes.
        nodes: number of nodes.
        cores: smallest number of cores of a node.
        gpus: smallest number of GPUs of a node.
        most_s: longest allowed duration of a job in seconds; None: no limit.
        usual_s: default time limit of a job in seconds; None: no limit.
    """

    name: str
    usual: bool
    up: bool
    nodes: int
    cores: int
    gpus: int
    most_s: float | None
    usual_s: float | None


def partitions() -> list[Partition]:
    """Return the partitions of this machine's cluster.

    Raises:
        MotleyError: this machine has no Slurm, or Slurm does not answer.
    """
    try:
        done = subprocess.run(
            ["sinfo", "-h", "-o", _FORMAT], capture_output=True, text=True, timeout=_ASK_S,
            check=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise MotleyError("this machine has no Slurm: the command sinfo is missing") from None
    except subprocess.TimeoutExpired:
        raise MotleyError(
            f"Slurm does not answer on this machine: sinfo took longer than {_ASK_S:.0f} s"
        ) from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise MotleyError(f"Slurm does not answer on this machine: {last}") from None
    return read_partitions(done.stdout.splitlines())


def read_partitions(lines: Iterable[str]) -> list[Partition]:
    """Return the partitions in sinfo's output, which has one line per kind of node."""
    result: dict[str, Partition] = {}
    for line in lines:
        name, starred, state, most, usual, nodes, cores, gpus = line.split("|")
        own = Partition(
            name, starred.endswith("*"), state == "up", int(nodes), int(cores.rstrip("+")),
            sum(map(int, _GPUS.findall(gpus))), seconds_of_slurm(most), seconds_of_slurm(usual),
        )  # fmt: skip
        before = result.get(name)
        result[name] = own if before is None else _together(before, own)
    return list(result.values())


def _together(one: Partition, other: Partition) -> Partition:
    return Partition(
        one.name, one.usual, one.up, one.nodes + other.nodes, min(one.cores, other.cores),
        min(one.gpus, other.gpus), one.most_s, one.usual_s,
    )  # fmt: skip


def seconds_of_slurm(text: str) -> float | None:
    """Convert 30 (minutes), 30:00, 4:00:00, 1-12 or 1-12:00:00 to seconds; None for no limit.

    Raises:
        MotleyError: the text is no time in Slurm's notation.
    """
    if text.lower() in ("infinite", "unlimited", "n/a", "none"):
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise MotleyError(
            f"{text!r} is not a time that Slurm accepts; write minutes as 30, hours as 4:00:00, "
            "or days and hours as 1-12"
        )
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1]:  # days-hours
        return 86400.0 * days + 3600 * first + 60 * second + third
    if match[4]:
        return 3600.0 * first + 60 * second + third
    return 60.0 * first + second
