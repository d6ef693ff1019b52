"""Have a host leave training after its current step, since another user needs the host.

  bash setup/leave_cn.sh ecetesla1              # until: bash setup/join_cn.sh ecetesla1
  bash setup/leave_cn.sh ecetesla1 --for 2h     # or 30m, 1d, 90s, 1h30m
  bash setup/leave_cn.sh ecetesla1 ecetesla3 --dry-run

Run this script on any host that reaches the named hosts by ssh, or on one of them. Your training on
these hosts ends after its current step. No step is lost, because all ranks together save the state
first. A run under setup/keep_training.sh continues on its other hosts, and adds the host again
after its return. Any other run ends, and prints how to continue it. A mark in /tmp/motley-UID on
the host keeps your runs away from the host until its return. A reboot of the host also removes the
mark.

Only you and root may send the signal that ends your training. Other processes on the host are not
touched.

The script refuses these requests, and then does nothing: a host that no hostfile names, a host
where no training of yours runs, and all hosts of a run, since the run would then end.

Options:
  --for TIME        come back automatically after this time; default: stay away
  --hostfile FILE   all hosts of the cluster; default: the repository's
                    hosts.txt (command motley: the current folder's)
  --dry-run         print what would leave, and change nothing

Exit status: 0 all named hosts have left, 1 some host has not, 2 nothing was begun.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from motley.cluster.login import is_here
from motley.cluster.ssh import run_on_all, split
from motley.errors import HostTrouble, MotleyError
from motley.membership.host_agent import WAIT_S
from motley.provision import setup_command
from motley.provision.setup_command import printable, run_module
from motley.text import did_you_mean, parse_seconds, typed_command

ASK_S = 15.0  # seconds in which a host answers, or ssh gives up


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the hosts that the user has named, each once.

    Raises:
        MotleyError: a host is not in the hostfile.
    """
    known = [host.name for host in setup_command.read_hostfile(options)]
    for name in options.hosts:
        if name not in known and not is_here_by_name(name):
            raise MotleyError(
                f"{name} is not in {options.hostfile}{did_you_mean(name, known)}, whose hosts are "
                f"{', '.join(known)}; name another hostfile with --hostfile FILE"
            )
    return list(dict.fromkeys(options.hosts))


def is_here_by_name(name: str) -> bool:
    """Return True if the word is a name of this machine. An option such as "-x" is no name."""
    return name[:1].isalnum() and is_here(name)


def ask_agent(host: str, *words: object, limit: float = ASK_S) -> dict[str, Any]:
    """Run ``python -m motley.membership.host_agent WORDS...`` on a host, and return its answer.

    Raises:
        HostTrouble: the host or the program gives no answer.
    """
    return read(run_module(host, "motley.membership.host_agent", *words, limit=limit))


def read(output: str) -> dict[str, Any]:
    """Parse the printed output of the program on a host, and return its answer.

    Raises:
        HostTrouble: the output is no answer, or reports an error.
    """
    try:
        answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise HostTrouble(
            "answer unreadable",
            "the host's answer cannot be read",
            "find the cause with: bash setup/test_cn_connection.sh",
        ) from None
    if "error" in answer:
        result, _, fix = str(answer["error"]).partition("; ")
        raise HostTrouble("refused", result, fix)
    return answer


def join_names(hosts: Sequence[str]) -> str:
    """Return a text such as "a, b and c" from the names of hosts."""
    *first, last = hosts
    return f"{', '.join(first)} and {last}" if first else last


def main(words: Sequence[str]) -> int:
    """Ask the hosts if they can leave, send them the request, and return the exit code."""
    parser = setup_command.Parser("leave_cn", __doc__)
    parser.add_argument("hosts", nargs="+", metavar="HOST")
    parser.add_argument("--for", dest="time")
    options = parser.parse_args(words)
    seconds = None if options.time is None else parse_time(options.time)
    hosts = chosen(options)
    result, troubles = split(
        setup_command.ask_all(hosts, lambda host: ask_agent(host, "ranks"), ASK_S)
    )
    refuse(result)
    for host, each in result.items():
        for rank in each["ranks"]:
            print(f"{host}: {printable(rank['description'])} (process {rank['pid']})")
    if options.dry_run:
        print(f"would have {join_names(hosts)} leave")
        return int(bool(troubles))
    if result:
        print("these processes end after their current step ...", flush=True)
    order = ["leave", *([] if seconds is None else [seconds])]
    work = partial(_leave, order)
    remaining, failed = split(run_on_all(result, work, WAIT_S + ASK_S))
    for host, each in remaining.items():
        print(describe_outcome(host, each))
    setup_command.print_troubles({**troubles, **failed})
    late = any(each["left"] for each in remaining.values())
    return int(bool(troubles or failed or late))


def _leave(order: Sequence[object], host: str) -> dict[str, Any]:
    return ask_agent(host, *order, limit=WAIT_S + ASK_S)


def describe_outcome(host: str, answer: Mapping[str, Any]) -> str:
    """Return a line for the user that says if a host has left the run."""
    back = typed_command(f"; the host takes part again after: bash setup/join_cn.sh {host}")
    if answer["left"]:
        pids = ", ".join(map(str, answer["left"]))
        return typed_command(
            f"{host}: process {pids} has not ended within {answer['seconds']:.0f} s; it ends "
            "after its step, or at once with: bash setup/clean_cn.sh --running"
        )
    ended = setup_command.many(answer["ranks"], "rank")
    return f"{host} has left{answer['until']}: {ended} ended in {answer['seconds']:.1f} s{back}"


def refuse(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise MotleyError if a host cannot leave.

    Args:
        found: answers of the hosts.
    """
    for host, each in found.items():
        if not each["ranks"] and not each["away"]:
            raise MotleyError(
                f"you have no training on {host} that it could leave, so nothing was changed. To "
                f"keep {host} out of a run, remove its line from the run's hostfile"
            )
    sizes = {rank["job"]: rank["size"] for each in found.values() for rank in each["ranks"]}
    there = Counter(rank["job"] for each in found.values() for rank in each["ranks"])
    for job, size in sizes.items():
        if there[job] >= size:
            hosts = [h for h, e in found.items() if any(r["job"] == job for r in e["ranks"])]
            raise MotleyError(
                f"{join_names(hosts)} cannot leave, because the run would have no host left, so "
                "nothing was changed. To end the run, press Ctrl-C where it was started; "
                "continue it later with --resume auto"
            )


def parse_time(word: str) -> int:
    """Return the seconds of a time such as 2h. Raise MotleyError if the word is no time."""
    seconds = parse_seconds(word)
    if seconds is None:
        raise MotleyError(
            f"--for {word!r} is not a time from 1s to 366d; write it as in 2h, 30m, 1d or 1h30m, "
            "or leave out --for to stay away until you run join_cn.sh"
        )
    return seconds


if __name__ == "__main__":
    setup_command.run(main)
