"""What a script at the other end of ssh says is heard to its end."""

from collections import deque

from motley.cluster.login import Talk, run_over


class Early:
    """A channel whose exit status comes before the last that was said, as sshd may send it."""

    closed = False

    def __init__(self, says: list[bytes], ends: bool) -> None:
        self._says, self._ends = deque(says), ends
        self._polls = 0

    def exec_command(self, _: str) -> None: ...

    def shutdown_write(self) -> None: ...

    def send_ready(self) -> bool:
        return True

    def send(self, data: bytes) -> int:
        return len(data)

    def exit_status_ready(self) -> bool:
        self._polls += 1
        return True

    def recv_exit_status(self) -> int:
        return 3

    def recv_ready(self) -> bool:
        return self._polls % 4 == 0 and bool(self._says)

    def recv(self, _: int) -> bytes:
        return self._says.popleft()

    def recv_stderr_ready(self) -> bool:
        return False

    @property
    def eof_received(self) -> bool:
        return self._ends and not self._says


def heard(ends: bool) -> str:
    talk = Talk("true", (), None, None)
    code = run_over(Early([talk._mark, b"one ", b"two\n"], ends), lambda: False, talk, 20)
    finished = talk.finish(code)
    assert finished.code == 3
    return finished.output


def test_what_comes_after_the_exit_status_is_heard() -> None:
    assert heard(ends=True) == "one two\n"


def test_nobody_waits_for_what_stays_behind_and_is_silent() -> None:
    assert heard(ends=False) == "one two\n"
