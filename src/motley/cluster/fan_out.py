"""The same work for many hosts at once."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from motley.errors import HostTrouble

T = TypeVar("T")


def run_on_all(
    hosts: Iterable[str], work: Callable[[str], T], limit: float
) -> dict[str, T | HostTrouble]:
    """Call ``work(host)`` for all hosts at once.

    Args:
        limit: seconds after which a host that has not finished is in trouble.

    Returns:
        What each returned, or the HostTrouble that it raised, in the hosts' order. Any other
        exception of any host is raised here.
    """
    results: dict[str, T | HostTrouble] = {}
    crashes: list[BaseException] = []

    def one(host: str) -> None:
        try:
            results[host] = work(host)
        except HostTrouble as trouble:
            results[host] = trouble
        except BaseException as error:
            crashes.append(error)

    order = list(hosts)
    threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in order]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if crashes:
        raise crashes[0]
    late = HostTrouble(
        "took too long",
        f"not finished within {limit:.0f} s",
        "see what keeps it busy, then run the same command again",
    )
    done = dict(results)  # a late one may still come in
    return {host: done.get(host, late) for host in order}


def split(results: Mapping[str, T | HostTrouble]) -> tuple[dict[str, T], dict[str, HostTrouble]]:
    """What :func:`run_on_all` returned, and the troubles, each by host."""
    well = {host: each for host, each in results.items() if not isinstance(each, HostTrouble)}
    troubles = {host: each for host, each in results.items() if isinstance(each, HostTrouble)}
    return well, troubles
