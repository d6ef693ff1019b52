"""The user's signals to keep_training.sh, which the launcher has to act on once."""

import signal
import subprocess
from collections.abc import Iterator

import pytest

from motley.provision import keep_training
from motley.provision.keep_training import Stop


def heed_signals() -> None:
    """Undo what a shell has set for a test that runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], preexec_fn=heed_signals) as job:
        yield job
        job.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_without_a_terminal_is_passed_on(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(keep_training, "is_in_foreground", lambda: False)
    Stop(job=launcher)(number, None)
    assert launcher.wait(5) == -number


def test_ctrl_c_is_left_to_the_terminal_unless_nothing_comes_of_it(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_training, "is_in_foreground", lambda: True)
    monkeypatch.setattr(keep_training, "ignores_hangup", lambda: False)  # as under nohup
    stop = Stop(job=launcher)
    stop(signal.SIGINT, None)
    stop.look()
    assert not stop.sent and launcher.poll() is None
    stop.at -= 60
    stop.look()
    assert stop.sent and launcher.wait(5) == -signal.SIGINT
