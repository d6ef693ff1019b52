"""Signals that end a program, which ``nohup`` may have told to outlive its terminal."""

import signal
from collections.abc import Callable
from types import FrameType


def handle_end(number: signal.Signals, handler: Callable[[int, FrameType | None], object]) -> None:
    """Set the handler of a signal. SIGHUP stays ignored where this process was started so.

    A shell that starts a program in the background has it ignore SIGINT too. Only another program
    sends that one there, and it means it.
    """
    if number != signal.SIGHUP or not ignores_hangup():
        signal.signal(number, handler)


def ignores_hangup() -> bool:
    """Return True if a closed terminal is to end nothing, as under nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
