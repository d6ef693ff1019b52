"""What a Slurm cluster has, as sinfo says it: partitions, and what their nodes are."""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from motley.errors import MotleyError

# Name (a star after the default one), state, longest and usual time, nodes, cores, GPUs.
_FORMAT = "%R|%P|%a|%l|%L|%D|%c|%G"
_ASK_S = 20.0
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_GPUS = re.compile(r"gpu:(?:[^:,()]+:)?(\d+)")


@dataclass(frozen=True)
class Partition:
    """A group of nodes.

    Attributes:
        usual: jobs that name none go there. nodes: how many there are.
        cores, gpus: of the node that has fewest.
        most_s, usual_s: seconds that a job may take, and takes where it does not say; None:
            without end.
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
    """Of the cluster that this machine belongs to.

    Raises:
        MotleyError: there is none, or it does not answer.
    """
    try:
        done = subprocess.run(
            ["sinfo", "-h", "-o", _FORMAT], capture_output=True, text=True, timeout=_ASK_S,
            check=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise MotleyError("there is no Slurm here: sinfo is not found") from None
    except subprocess.TimeoutExpired:
        raise MotleyError(f"Slurm does not answer here (no answer in {_ASK_S:.0f} s)") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise MotleyError(f"Slurm does not answer here ({last})") from None
    return read_partitions(done.stdout.splitlines())


def read_partitions(lines: Iterable[str]) -> list[Partition]:
    """What sinfo says in ``_FORMAT``: a line for each kind of node of a partition."""
    found: dict[str, Partition] = {}
    for line in lines:
        name, starred, state, most, usual, nodes, cores, gpus = line.split("|")
        own = Partition(
            name, starred.endswith("*"), state == "up", int(nodes), int(cores.rstrip("+")),
            sum(map(int, _GPUS.findall(gpus))), seconds_of_slurm(most), seconds_of_slurm(usual),
        )  # fmt: skip
        before = found.get(name)
        found[name] = own if before is None else _together(before, own)
    return list(found.values())


def _together(one: Partition, other: Partition) -> Partition:
    return Partition(
        one.name, one.usual, one.up, one.nodes + other.nodes, min(one.cores, other.cores),
        min(one.gpus, other.gpus), one.most_s, one.usual_s,
    )  # fmt: skip


def seconds_of_slurm(text: str) -> float | None:
    """Of 30 (minutes), 30:00, 4:00:00, 1-12 or 1-12:00:00; None where there is no end.

    Raises:
        MotleyError: it is no time.
    """
    if text.lower() in ("infinite", "unlimited", "n/a", "none"):
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise MotleyError(
            f"{text!r} is no time of Slurm's; write minutes, as 30, or 4:00:00, or 1-12 (a day and "
            "a half)"
        )
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1]:  # days-hours
        return 86400.0 * days + 3600 * first + 60 * second + third
    if match[4]:
        return 3600.0 * first + 60 * second + third
    return 60.0 * first + second
