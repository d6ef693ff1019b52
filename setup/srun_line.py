"""Slurm's words before ./entry_cn.sh: how many ranks on which nodes, and the same without some."""

import os
from collections.abc import Mapping, Sequence

from motley.cluster.hostfile import Host
from motley.cluster.slurm import allocated_nodes, expand_nodes

_TASKS, _NODES, _LIST = ("-n", "--ntasks"), ("-N", "--nodes"), ("-w", "--nodelist")
_PER_NODE = ("--ntasks-per-node",)
NODE_COUNTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")  # variables that say what was granted


def hosts_of_step(
    words: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[Host, ...]:
    """The nodes that srun starts ranks on, with how many; empty outside of an allocation.

    Args:
        words: srun and its options.
    """
    nodes = allocated_nodes(environ)
    if named := _value(words, _LIST):
        nodes = [node for node in expand_nodes(named) if node in nodes]
    nodes = nodes[: _number(_value(words, _NODES)) or len(nodes)]
    if not nodes:
        return ()
    each = _number(_value(words, _PER_NODE))
    tasks = _number(_value(words, _TASKS)) or _number(environ.get("SLURM_NTASKS"))
    if tasks is None or (each and each * len(nodes) <= tasks):
        return tuple(Host(node, each or 1) for node in nodes)
    most, more = divmod(tasks, len(nodes))
    counts = [most + (number < more) for number in range(len(nodes))]
    return tuple(Host(node, count) for node, count in zip(nodes, counts, strict=True) if count)


def on_hosts(words: Sequence[str], hosts: Sequence[Host]) -> list[str]:
    """The same for these nodes alone, whatever Slurm still has to end there."""
    left = list(words)
    for flags in (_TASKS, _NODES, _LIST, _PER_NODE):
        left = _without(left, flags)
    tasks = sum(host.slots for host in hosts)
    names = ",".join(host.name for host in hosts)
    most = max(host.slots for host in hosts)
    return [
        left[0], "--overlap", f"--nodes={len(hosts)}", f"--ntasks={tasks}",
        f"--ntasks-per-node={most}", f"--nodelist={names}", *left[1:],
    ]  # fmt: skip


def _number(value: str | None) -> int | None:
    return int(value) if value and value.isdigit() and int(value) else None


def _value(words: Sequence[str], flags: Sequence[str]) -> str | None:
    """Of the last of these options: ``-n 3``, ``-n3``, ``--ntasks 3`` or ``--ntasks=3``."""
    found = None
    for at, word in enumerate(words):
        for flag in flags:
            if word == flag and at + 1 < len(words):
                found = words[at + 1]
            elif _is_joined(word, flag):
                found = word.removeprefix(flag).removeprefix("=")
    return found


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    left, skip = list[str](), False
    for word in words:
        own = skip or word in flags or any(_is_joined(word, flag) for flag in flags)
        skip = not skip and word in flags
        if not own:
            left.append(word)
    return left


def _is_joined(word: str, flag: str) -> bool:
    start = f"{flag}=" if flag.startswith("--") else flag
    return word.startswith(start) and word != flag and not (start == flag and word[1] == "-")
