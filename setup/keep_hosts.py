"""Whom keep_training.py may start a run on: who answers and is not away; who gives way politely."""

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cn_away import ASK_S, tell
from cn_module import run_module

from motley.cluster.hostfile import Host
from motley.cluster.ssh import run_on_all, split
from motley.errors import HostTrouble

QUIET_S = 300.0  # that nobody else was at a polite host before it comes back
_AGAIN_S = 60.0  # before a polite host that was lost is asked to be so again
_NO_END_S = 1e9


@dataclass(frozen=True)
class Asked:
    """What the hosts have answered.

    Attributes:
        alive: those that can take part, in the hostfile's order.
        lost: what was found of those that do not answer. away: until when others are away, in
            words. ends: when the marks of these end, seconds since the epoch, where they do.
        nodes: what a host calls itself, which is what a run's records call it.
        sees: it sees the run's folder as this machine does.
        speeds: by its own name, what it remembers; see motley.membership.host_agent.
    """

    alive: tuple[Host, ...]
    lost: dict[str, str]
    away: dict[str, str]
    ends: tuple[float, ...]
    nodes: dict[str, str]
    sees: dict[str, bool]
    speeds: dict[str, list[dict[str, Any]]]

    @property
    def missing(self) -> frozenset[str]:
        """Who takes no part."""
        return frozenset(self.lost) | frozenset(self.away)


def ask(hosts: Sequence[Host], folder: Path, unwanted: frozenset[str] = frozenset()) -> Asked:
    """Ask all hosts at once; it takes no longer than one.

    Args:
        folder: of the run. unwanted: hosts that do not take part in any case.
    """
    place = folder.absolute()
    found, troubles = split(run_on_all([h.name for h in hosts], lambda h: _ask(h, place), ASK_S))
    lost = {name: trouble.found for name, trouble in troubles.items()}
    lost |= dict.fromkeys(unwanted, "no step was taken with it")
    marks = {name: said["away"] for name, said in found.items() if said.get("away")}
    away = {name: _why(mark) for name, mark in marks.items() if name not in lost}
    return Asked(
        tuple(host for host in hosts if host.name not in {*lost, *away}), lost, away,
        tuple(mark["until"] for mark in marks.values() if mark["until"]),
        {name: str(said.get("node", name)) for name, said in found.items()},
        {name: bool(said.get("sees")) for name, said in found.items()},
        {str(said.get("node", name)): said.get("speeds", []) for name, said in found.items()},
    )  # fmt: skip


def _ask(host: str, folder: Path) -> dict[str, Any]:
    try:
        return tell(host, "ask", folder, limit=ASK_S)
    except HostTrouble as trouble:
        if trouble.kind in ("no environment", "cannot look"):  # mpirun will say what is wrong
            return {}
        raise


def _why(mark: dict[str, Any]) -> str:
    return f" ({mark['polite']})" if mark["polite"] else str(mark["words"])


def be_polite(hosts: Sequence[Host]) -> None:
    """Have all hosts give way to others from now on, each watched by a process of its own there,
    which ends with this one."""
    for host in hosts:
        threading.Thread(target=_be_polite, args=(host.name,), daemon=True).start()


def _be_polite(host: str) -> None:
    while True:
        try:
            run_module(host, "motley.membership.host_agent", "polite", QUIET_S, limit=_NO_END_S)
        except HostTrouble:
            time.sleep(_AGAIN_S)


def say(text: str) -> None:
    """To the user, at once."""
    print(f"keep_training: {text}", file=sys.stderr, flush=True)
