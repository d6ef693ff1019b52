"""Before a job ends by a lost rank, one that is left saves what all of them hold."""

import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

from motley.launch.messages import encode
from motley.launch.own_rank import OwnRank
from motley.launch.watchdog import RankStatus

HOLD_S = 60.0  # that it may take
# Open MPI 5 kills the others 0.5 s after a rank is lost, 4.1 after 2 s: too soon for a large model.
_CUT_SHORT = (
    "motley: the last step is not saved: the launcher ended all ranks while one wrote it; --resume "
    "auto goes on from the checkpoint before, and --save-every 1m makes more of them"
)


def save_before_end(
    own: OwnRank,
    others: Mapping[socket.socket, RankStatus],
    lost: int,
    tell_all: Callable[[dict[str, Any]], None],
) -> None:
    """Have the state saved, by rank 0 or another rank that can, while the others wait.

    Args:
        others: all ranks but 0. lost: who cannot, by its number in the launch.
    """
    able = [line for line, each in others.items() if each.rescues and each.number != lost]
    if not able and own.rescue is None:
        return
    tell_all({"hold": True})
    reaper = None if own.stopped else own.reaper  # which else has a line to print already
    if reaper:
        reaper.tell(line=_CUT_SHORT)
    said = own.save_what_is_known() if own.rescue else _ask(able[0], others[able[0]])
    if reaper:
        reaper.tell(line="")
    if said:
        own.print(f"motley: {said}")


def _ask(line: socket.socket, status: RankStatus) -> str:
    """What a rank says that it has saved."""
    with contextlib.suppress(OSError):
        line.sendall(encode({"rescue": True}))
        line.settimeout(HOLD_S)
        while data := line.recv(65536):
            for message in status.messages.feed(data):
                if "rescued" in message:
                    return str(message["rescued"])
    return ""
