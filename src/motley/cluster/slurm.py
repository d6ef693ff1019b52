"""The nodes of Slurm's allocation that this process is in, and how a command is run on one.

Read from the environment alone: in a container there is no ``scontrol``.
"""

import os
import re
from collections.abc import Iterator, Mapping
from itertools import product

from motley.cluster.hostfile import check_name
from motley.errors import MotleyError

_MOST = 100_000  # nodes; a list of more is none
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodes(names: str) -> list[str]:
    """The nodes of a list as Slurm writes it, in its order: ``n[1-3,07],gpu-a[1-2]-b[1-2]``.

    Raises:
        MotleyError: it is no such list, or a name in it is no host name.
    """
    found: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", names):
        parts, at = list[list[str]](), 0
        for match in _PART.finditer(item):
            if match.start() != at:
                break
            inside, plain = match.groups()
            parts.append([plain] if inside is None else list(_numbers(inside, names)))
            at = match.end()
        if at != len(item):
            raise MotleyError(f"{names!r} is no list of Slurm's nodes, such as n[1-3],gpu07")
        found += [check_name("".join(each)) for each in product(*parts)]
        if len(found) > _MOST:
            raise MotleyError(f"{names!r} names more than {_MOST:,} nodes")
    return found


def _numbers(ranges: str, names: str) -> Iterator[str]:
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _MOST:
            raise MotleyError(f"{names!r} is no list of Slurm's nodes: {each!r} is no range")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def allocated_nodes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Of the allocation as it was granted; empty where this process is in none."""
    names = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    return expand_nodes(names) if environ.get("SLURM_JOB_ID") else []


def idle_nodes(machines: int, environ: Mapping[str, str] = os.environ) -> str:
    """What to say where ranks run on fewer machines than Slurm has given; else empty."""
    try:
        nodes = allocated_nodes(environ)
    except MotleyError:
        return ""  # who has to know them says so
    if len(nodes) <= machines:
        return ""
    return (
        f"Slurm has given {len(nodes)} nodes, and ranks run on {machines} of them: start it with "
        f"srun --mpi=none --nodes={len(nodes)} --ntasks-per-node=1 ./entry_cn.sh (or as many tasks "
        "as a node has GPUs)"
    )


def srun_words(mpi: str = "none") -> list[str]:
    """The words that start a rank on each place of an allocation; with "none" they meet by
    themselves. They end by themselves too, with a status that says how."""
    return ["srun", f"--mpi={mpi}", "--kill-on-bad-exit=0"]


def on_node(node: str) -> list[str]:
    """The words before a command that is to run on a node of the allocation, beside its job."""
    return [
        "srun", "--overlap", "--mpi=none", "--quiet", "--nodes=1", "--ntasks=1",
        "--ntasks-per-node=1", f"--nodelist={node}",
    ]  # fmt: skip
