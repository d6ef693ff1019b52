"""The network that the hosts of hosts.txt take: each one that they share is tried.

The choice is that of a training (motley.launch.world), which tries them in the same way.
"""

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cn import ROOT, VENV
from cn_report import HostReport

from motley.cluster.network import Answer, Network, list_networks, next_in_ring, pick_network
from motley.cluster.ssh import Remote, connect, run_on_all, split
from motley.errors import HostTrouble

LISTEN_S, TRIAL_S = 20.0, 60.0
_TALK = """
python=$1/bin/python talk=$2/setup/cn_talk.py
PYTHONPATH=$2/src; export PYTHONPATH; shift 2; "$python" "$talk" "$@"
"""


@dataclass(frozen=True)
class Listening:
    """The ports on which a host listens.

    Attributes:
        ports: for each of its addresses, 0 where it opens none. token: for connections to it.
    """

    ports: tuple[int, ...]
    token: str


Peer = tuple[str, str, int, str]  # name, address, port and token


def talk(remote: Remote, work: str, peers: Sequence[Peer]) -> str:
    """Return what cn_talk.py prints on a host that connects to these."""
    told = json.dumps(peers).encode()
    return remote.run(_TALK, VENV, ROOT, work, payload=told, limit=TRIAL_S).output


@contextlib.contextmanager
def listen_on(
    addresses: Mapping[str, Sequence[str]],
) -> Iterator[tuple[dict[str, Remote], dict[str, Listening]]]:
    """Have each host listen on addresses of its own.

    Yields:
        A connection to each host, and what it listens on; a host that does not tell is missing
        from the second.
    """
    listening: dict[str, Listening] = {}
    ready = threading.Semaphore(0)

    def listen(host: str, remote: Remote) -> None:
        def tell(line: str) -> None:
            *ports, token = line.split()
            listening[host] = Listening(tuple(map(int, ports)), token)
            ready.release()

        with contextlib.suppress(HostTrouble, ValueError):  # it is ended from here
            remote.run(_TALK, VENV, ROOT, "listen", *addresses[host], limit=TRIAL_S, tell=tell)
        ready.release()

    connected = run_on_all(addresses, connect, LISTEN_S)
    remotes, troubles = split(connected)
    try:
        for trouble in troubles.values():
            raise trouble
        for host, remote in remotes.items():
            threading.Thread(target=listen, args=(host, remote), daemon=True).start()
        for _ in remotes:
            ready.acquire(timeout=LISTEN_S)
        yield remotes, listening
    finally:
        for remote in remotes.values():
            remote.close()


def try_networks(
    reports: Mapping[str, HostReport], only_choice: bool = True
) -> tuple[dict[str, Network], str]:
    """Return where each host sits on the fastest network that connects all, and what was found.

    Args:
        only_choice: a network that is the only one is tried too.

    Raises:
        MotleyError: there is none.
    """
    hosts = list(reports)
    names = dict(enumerate(hosts))
    machines = {number: reports[host].interfaces for number, host in names.items()}
    candidates = list_networks(machines, names, {})
    if len(hosts) == 1 or (len(candidates) == 1 and not only_choice):
        return {host: candidates[0][number] for number, host in names.items()}, ""
    at = {host: [each[number].address for each in candidates] for number, host in names.items()}
    with listen_on(at) as (remotes, doors):

        def measure(host: str) -> list[Answer]:
            peer = hosts[next_in_ring(hosts.index(host), list(names))]
            door = doors.get(peer, Listening((0,) * len(candidates), ""))
            targets = [(peer, a, p, door.token) for a, p in zip(at[peer], door.ports, strict=True)]
            answers: list[Answer] = json.loads(talk(remotes[host], "measure", targets))
            return answers

        told = run_on_all(hosts, measure, TRIAL_S)
    for answer in told.values():
        if isinstance(answer, HostTrouble):
            raise answer
    answers = {n: told[host] for n, host in names.items()}
    chosen, words = pick_network(candidates, answers, names)  # type: ignore[arg-type]
    return {host: candidates[chosen][number] for number, host in names.items()}, words
