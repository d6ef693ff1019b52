"""What leave_cn.py, join_cn.py and keep_training.py share: which hosts, and what each answers."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import cn
from cn_module import run_module

from motley.cluster.login import is_here
from motley.errors import HostTrouble, MotleyError
from motley.text import did_you_mean

ASK_S = 15.0  # in which a host answers, or ssh has given up


def chosen(options: argparse.Namespace) -> list[str]:
    """The hosts that the user has named, each once.

    Raises:
        MotleyError: one is not in the hostfile.
    """
    known = [host.name for host in cn.read_hostfile(options)]
    for name in options.hosts:
        if name not in known and not is_here_by_name(name):
            raise MotleyError(
                f"{name} is not in {options.hostfile}{did_you_mean(name, known)}; its hosts are "
                f"{', '.join(known)}; another file of hosts: --hostfile FILE"
            )
    return list(dict.fromkeys(options.hosts))


def is_here_by_name(name: str) -> bool:
    """Whether a name is this machine's own; one that starts with '-' is no name."""
    return name[:1].isalnum() and is_here(name)


def tell(host: str, *words: object, limit: float = ASK_S) -> dict[str, Any]:
    """Return the answer of a host's ``motley.membership.host_agent WORDS...``.

    Raises:
        HostTrouble: there is none.
    """
    return read(run_module(host, "motley.membership.host_agent", *words, limit=limit))


def read(output: str) -> dict[str, Any]:
    """The answer in what it has printed; HostTrouble where it says what is wrong."""
    try:
        answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise HostTrouble(
            "cannot ask", "its answer cannot be read", "see: bash setup/test_cn_connection.sh"
        ) from None
    if "error" in answer:
        found, _, fix = str(answer["error"]).partition("; ")
        raise HostTrouble("refused", found, fix)
    return answer


def words_of(hosts: Sequence[str]) -> str:
    """a, b and c"""
    *first, last = hosts
    return f"{', '.join(first)} and {last}" if first else last
