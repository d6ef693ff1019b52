"""Signals that whoever started a process has it ignore: they stay ignored.

``nohup`` ignores SIGHUP, so that a closed terminal ends nothing.
"""

import signal
from collections.abc import Callable
from types import FrameType


def handle_unless_ignored(
    number: signal.Signals, handler: Callable[[int, FrameType | None], object]
) -> None:
    """Set the handler of a signal, unless this process was started with the signal ignored."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def ignores_hangup() -> bool:
    """Return True if a closed terminal is to end nothing, as under nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
