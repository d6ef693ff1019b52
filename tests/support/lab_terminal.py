"""A command on a host of a lab, with somebody at a real terminal to answer what it asks."""

import os
import select
import subprocess
import time
from collections.abc import Callable

from jobs import Done
from lab_door import Door
from project import ROOT, environment, venv


class Terminal:
    """One command, started; its terminal is its controlling one too."""

    def __init__(self, door: Door, host: str, *command: object) -> None:
        self.output = ""
        self._start = time.monotonic()
        self._screen, keyboard = os.openpty()
        words = ["bash", "lab/lab.sh", "exec", host, "--name", door.name, "--", *command]
        self._job = subprocess.Popen(
            ["setsid", "--ctty", *map(str, words)], cwd=ROOT,
            env=environment(MOTLEY_VENV=str(venv())),
            stdin=keyboard, stdout=keyboard, stderr=keyboard,
        )  # fmt: skip
        os.close(keyboard)

    def read(self, limit: float = 30) -> bool:
        """Read what comes next; False at its end."""
        ready, _, _ = select.select([self._screen], [], [], limit)
        assert ready, f"nothing for {limit} s after: {self.output}"
        try:
            data = os.read(self._screen, 4096)
        except OSError:  # Linux's word for: nobody has it open any more
            return False
        self.output += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    def await_text(self, text: str, start: int = 0) -> int:
        """Wait until it shows ``text``; the place behind that."""
        while (at := self.output.find(text, start)) < 0:
            assert self.read(), f"{text!r} never came: {self.output}"
        return at + len(text)

    def answer(
        self, *answers: tuple[str, str], meanwhile: Callable[[], None] = lambda: None
    ) -> Done:
        """Wait for each prompt in turn and type its answer; then for the end.

        Args:
            meanwhile: called again and again after the last answer.
        """
        at = 0
        for prompt, typed in answers:
            at = self.await_text(prompt, at)
            self.type(typed)
        meanwhile()
        while self.read():
            meanwhile()
        os.close(self._screen)
        return Done(self._job.wait(10), self.output, time.monotonic() - self._start)

    def answer_if_asked(self, prompt: str, typed: str) -> Done:
        """Type an answer if it asks; wait for the end."""
        while prompt not in self.output and self.read():
            pass
        if prompt in self.output:
            self.type(typed)
        return self.answer()

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self._screen, f"{line}\n".encode())

    def kill(self) -> None:
        """SIGKILL; what runs on the host ends with it."""
        self._job.kill()
        self._job.wait()
        os.close(self._screen)
