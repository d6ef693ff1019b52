"""While a job runs without some hosts: asks them again, and has it end where that is worth it."""

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from cn_away import ASK_S, tell, words_of
from keep_figures import Figures
from keep_hosts import Asked, say

from motley.cluster.ssh import run_on_all, split

ASK_AGAIN_S = 60.0  # between questions to hosts that are missing
_NOT_YET_S = 5.0  # where no usual time of a step is known


def until_asked_s(asked: Asked) -> float:
    """Seconds until hosts are asked again: sooner where one has said when it comes back."""
    return max(1.0, min([ASK_AGAIN_S, *(end - time.time() + 0.5 for end in asked.ends)]))


class Returns:
    """Of one job.

    Args:
        folder: of its run. asked: before it was started. ask: asks all hosts once more.
    """

    def __init__(
        self, folder: Path, figures: Figures, asked: Asked, ask: Callable[[], Asked]
    ) -> None:
        self._folder, self._figures, self._ask = folder, figures, ask
        self._missing, self._nodes = asked.missing, asked.nodes
        self._due = time.monotonic() + until_asked_s(asked)
        self._answers: list[Asked] = []
        self._thread: threading.Thread | None = None
        self._paused = 0.0  # when the job was asked to end
        self._told = frozenset[str]()

    def look(self) -> None:
        """Ask if it is time, and act on what was answered; waits for nobody."""
        if self._paused:
            return
        if self._thread is None and time.monotonic() >= self._due:
            lost = self._figures.lost()
            self._missing |= {name for name, node in self._nodes.items() if node in lost}
            self._due = time.monotonic() + ASK_AGAIN_S
            if not self._missing:
                return
            self._thread = threading.Thread(target=self._question, daemon=True)
            self._thread.start()
        elif self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self._answers:
                self._hear(self._answers.pop())

    def ended(self) -> None:
        """The job has."""
        if self._paused:
            self._figures.ended(self._paused)

    def _question(self) -> None:
        self._answers = [self._ask()]

    def _hear(self, asked: Asked) -> None:
        self._due = time.monotonic() + until_asked_s(asked)
        back = self._missing - asked.missing
        if not back:
            return
        nodes = {name: asked.nodes.get(name, name) for name in sorted(back)}
        gain = self._figures.take_back(
            {node: asked.speeds.get(node, []) for node in nodes.values()}
        )
        trains = self._figures.training()  # but for lost ranks
        words = [f"the rest of {name}" if nodes[name] in trains else name for name in nodes]
        names = f"{words_of(words)} {'is' if len(back) == 1 else 'are'}"
        if gain is None:
            self._due = time.monotonic() + _NOT_YET_S
        elif not gain.worth_it:
            if back != self._told:
                say(f"{names} there again, and not taken back: {gain.sentence()}")
            self._told = back
        elif self._pause([h.name for h in asked.alive if asked.nodes.get(h.name) in trains]):
            say(f"{names} taken back after this step: {gain.sentence()}")

    def _pause(self, hosts: Collection[str]) -> bool:
        """Have the job save and end at a step boundary; whether some rank was there to hear it.

        The signal goes to ranks themselves: mpirun would send it to all that these have started,
        such as compilers, which it ends.
        """
        asked = time.time()
        words = ("pause", str(self._folder.parent), self._folder.name)
        told, _ = split(run_on_all(hosts, lambda host: tell(host, *words), ASK_S))
        if any(answer.get("asked") for answer in told.values()):
            self._paused = asked
        return bool(self._paused)
