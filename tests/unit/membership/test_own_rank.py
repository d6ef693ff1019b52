"""Signals of a rank's child processes are not signals of the rank."""

import subprocess
import sys

PARENT = """
import os, signal
from motley.membership.own_rank import Outbox

outbox = Outbox()
outbox.catch_signals()
for _ in range(50):
    if not (child := os.fork()):
        signal.pause()
    os.kill(child, signal.SIGTERM)  # maybe before the child runs Python again
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
assert outbox.read_signals() == []
os.kill(os.getpid(), signal.SIGTERM)
assert outbox.read_signals() == [signal.SIGTERM]
"""


def test_a_rank_is_not_stopped_by_the_end_of_its_child() -> None:
    words = [sys.executable, "-c", PARENT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
