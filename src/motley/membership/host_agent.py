"""The commands on a host by which the host leaves training and comes back.

setup/leave_cn.sh, join_cn.sh and keep_training.sh run this module by ssh on the host. Each command
prints one line of JSON. A mark is a file that keeps all ranks of this user away from the host.

    python -m motley.membership.host_agent ranks             # report local ranks, and the mark
    python -m motley.membership.host_agent ask FOLDER        # report the mark, and if FOLDER exists
    python -m motley.membership.host_agent leave [SECONDS]   # mark it, end its ranks, wait
    python -m motley.membership.host_agent join              # remove the mark
    python -m motley.membership.host_agent pause LOGS RUN    # save and end at a step boundary
    python -m motley.membership.host_agent polite SECONDS    # leave while another user is here

Only this user and root can run these commands. The mark lies in a folder of this user's, and only
this user and root may send signals to the ranks.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from motley.cluster.account import SPEED_FILES, cache_folder
from motley.cluster.orphans import TrainingProcess, survey
from motley.cluster.processes import is_alive, send
from motley.errors import MotleyError
from motley.membership.away import find_other_user, mark_away, read_away, remove_mark
from motley.membership.pause import LEAVE_SIGNAL, PAUSE_SIGNAL
from motley.plan.speeds import SpeedTable

WAIT_S = 300.0  # seconds to wait for ranks that leave: they finish a step and save their state
_LOOK_S = 0.1
_MOST_SPEEDS = 10  # largest number of speeds that are reported
_PRESENCE_S = 5.0  # seconds between two checks for another user


def own_ranks() -> list[TrainingProcess]:
    """Return this user's ranks on this machine that run this copy of Motley."""
    return [each for each in survey().processes if each.kind == "rank"]


def ask_to_leave(ranks: Sequence[TrainingProcess]) -> None:
    """Send ranks of this machine the signal that the machine has to leave.

    A rank that starts later reads the machine's mark instead; see motley.membership.away.
    """
    for each in ranks:
        send(each.pid, each.ticks, LEAVE_SIGNAL)


def leave(seconds: float | None) -> dict[str, Any]:
    """Mark this machine as away, wait until its ranks have ended, and return a report.

    Args:
        seconds: duration of the mark; None: no end.
    """
    away, start = mark_away(seconds), time.monotonic()
    ranks = own_ranks()  # later ones see the mark
    ask_to_leave(ranks)
    held = {pid: ticks for each in ranks for pid, ticks in ((each.pid, each.ticks), *each.workers)}
    remaining = held
    while remaining and time.monotonic() - start < WAIT_S:
        time.sleep(_LOOK_S)
        remaining = {pid: ticks for pid, ticks in remaining.items() if is_alive(pid, ticks)}
    return {
        "ranks": len(ranks), "seconds": time.monotonic() - start, "left": list(remaining),
        "until": away.until_words(),
    }  # fmt: skip


def pause(logs: str, run: str) -> dict[str, Any]:
    """Ask one rank of a run on this machine to pause the job.

    The rank informs all other ranks. In a pause, the job saves its state and ends.

    Args:
        logs: folder of all runs.
        run: name of the run.

    Returns:
        ``{"asked": True}``, or ``{"asked": False}`` if no rank of the run is on this machine.
    """
    for each in own_ranks():
        words = f" {each.description.replace('=', ' ')} "
        place = re.search(r" --logs (\S+)", words)
        named = f" --run {run} " in words and (not place or Path(place[1]) == Path(logs))
        if named and send(each.pid, each.ticks, PAUSE_SIGNAL):
            return {"asked": True}
    return {"asked": False}


def speeds() -> list[dict[str, Any]]:
    """Return the speeds of this machine's devices that earlier runs have stored, the newest first.

    Each item has a speed in samples per second, summed over all ranks that share the device, and
    the options of the measured run.
    """
    files = [(path.stat().st_mtime, path) for path in cache_folder().glob(SPEED_FILES)]
    result = []
    for _, path in sorted(files, reverse=True)[:_MOST_SPEEDS]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text())
            key, rate = content["key"], SpeedTable.from_json(content["speed"]).rate
            each = {"options": key["options"], "uuid": key["uuid"]}
            result.append({**each, "rate": rate * (1 if key["uuid"] else key["ranks"])})
    return result


def be_polite(quiet_s: float) -> None:
    """Mark this machine as away whenever another user needs it.

    The mark ends once no other user was seen for ``quiet_s`` seconds. Each mark lasts ``quiet_s``
    seconds and is renewed while another user is seen. If this process ends, the mark therefore ends
    soon too. A mark that leave_cn.sh has set stays unchanged.
    """
    while True:
        if seen := find_other_user():
            away = read_away()
            if away is None or away.polite:
                mark_away(quiet_s, f"--polite: {seen}")
                ask_to_leave(own_ranks())
        time.sleep(_PRESENCE_S)


def _answer(words: Sequence[str]) -> dict[str, Any]:
    what, *rest = words
    if what == "leave":
        return leave(float(rest[0]) if rest else None)
    if what == "join":
        was = read_away()
        remove_mark()
        return {"away": was and asdict(was)}
    if what == "pause":
        return pause(*rest)
    away = read_away()
    answer: dict[str, Any] = {
        "node": os.uname().nodename,
        "away": away and {**asdict(away), "words": away.until_words()},
    }
    if what == "ask":
        answer |= {"sees": Path(rest[0], "run.json").exists(), "speeds": speeds()}
    if what == "ranks":
        answer["ranks"] = [asdict(each) for each in own_ranks()]
    return answer


def main(words: Sequence[str]) -> None:
    """Run the command in ``words``, and print the answer or an error for the user as JSON."""
    if words[0] == "polite":
        with contextlib.suppress(KeyboardInterrupt):
            be_polite(float(words[1]))
        return
    try:
        print(json.dumps(_answer(words)))
    except MotleyError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main(sys.argv[1:])
