"""Says at launch which ranks of earlier jobs are still on this machine, holding its GPU and memory.

A thread of the lowest rank of each machine looks: a launch waits for nothing of this.
"""

import contextlib
import sys
import threading

from motley.cluster.processes import state, survey

_AGE_S = 10.0  # younger ones may be ending: of the job before, in a loop of jobs


def say_leftovers() -> None:
    """Begin to look; what is found is said once, in one line."""
    threading.Thread(target=_look, name="leftovers", daemon=True).start()


def _look() -> None:
    with contextlib.suppress(Exception):  # a process that ends meanwhile, a driver: it is advice
        here = survey()
        old = [
            each for each in here.found
            if each.kind == "rank" and each.age_s > _AGE_S
            and state(each, [(here.node, here.mpiruns)]) == "leftover"
        ]  # fmt: skip
        if old:
            print(words(here.node, [each.pid for each in old]), file=sys.stderr, flush=True)


def words(host: str, pids: list[int]) -> str:
    """What to say of processes that were left."""
    many = len(pids) > 1
    shown = ", ".join(map(str, pids[:8])) + (", ..." if len(pids) > 8 else "")
    return (
        f"  {host} still has {len(pids)} rank{'s' * many} of earlier runs (process{'es' * many} "
        f"{shown}), which may hold its GPU; end {'them' if many else 'it'} with: bash "
        "setup/clean_cn.sh"
    )
