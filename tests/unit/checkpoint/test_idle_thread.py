"""What nobody waits for takes idle time; what is left when somebody does is done at once."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from motley.checkpoint import store
from motley.checkpoint.store import IdleThread


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class Work:
    """Three pieces, each as soon as it is let."""

    def __init__(self, thread: IdleThread, error: Exception | None = None) -> None:
        self.thread, self.error = thread, error
        self.let = [threading.Event() for _ in range(3)]
        self.done = [threading.Event() for _ in range(3)]
        self.seen: list[int] = []

    def pieces(self) -> Iterator[None]:
        for let, done in zip(self.let, self.done, strict=True):
            assert let.wait(10)
            self.seen.append(niceness())
            done.set()
            if self.error and len(self.seen) == 3:
                raise self.error
            yield

    def __call__(self, path: Path) -> Path:
        self.thread.run(self.pieces())
        return path


def test_the_rest_is_done_at_the_priority_of_who_waits_for_it(tmp_path: Path) -> None:
    thread, mine = IdleThread(), niceness()
    for _ in range(2):  # and the next is in no hurry again
        work = Work(thread)
        result = thread.submit(work, tmp_path)
        work.let[0].set()
        assert work.done[0].wait(10)
        thread.hurry()
        for let in work.let:
            let.set()
        assert result.result(10) == tmp_path
        # The second may have been begun before.
        assert work.seen[0] == 19 and work.seen[2] == mine, work.seen
    assert niceness() == mine


def test_where_there_is_no_idle_time_it_is_done_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PATIENCE_S", 0.0)
    thread = IdleThread()
    work = Work(thread)
    for let in work.let:
        let.set()
    assert thread.submit(work, tmp_path).result(10) == tmp_path
    assert work.seen == [19, niceness(), niceness()]


def test_whoever_does_it_an_error_is_told(tmp_path: Path) -> None:
    thread = IdleThread()
    work = Work(thread, OSError("full"))
    result = thread.submit(work, tmp_path)
    thread.hurry()
    for let in work.let:
        let.set()
    with pytest.raises(OSError, match="full"):
        result.result(10)


def test_another_thread_does_its_own(tmp_path: Path) -> None:
    thread = IdleThread()
    work = Work(thread)
    for let in work.let:
        let.set()
    assert work(tmp_path) == tmp_path and work.seen == 3 * [niceness()]
