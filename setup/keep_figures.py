"""What keep_training.py knows of a run's speed, from its records: does a host's return pay?"""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from motley.plan.take_back import TakeBack, step_with
from motley.records.run_folder import RunFolder

_FEW = 4  # steps, of which no usual time is known


def progress(folder: Path) -> int:
    """The step of a run's newest checkpoint; -1: there is none."""
    names = (path.name.removeprefix("step_") for path in (folder / "checkpoints").glob("step_*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


class Figures:
    """Of one run, over all its starts.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)
        # Of each host, by its own name: samples a second of all its ranks, 0 where the plan has
        # left it out; and how many ranks these are.
        self._rates: dict[str, float] = {}
        self._ranks = Counter[str]()
        self._steps: dict[frozenset[tuple[str, int]], float] = {}  # seconds of one, by who trains
        self._launched = 0.0
        self._starts: list[float] = []  # seconds from each launch to its first step
        self._end_s = 0.0  # from when the end was asked for

    def launched(self) -> None:
        """A start begins now."""
        self._launched, self._first, self._knows = time.time(), False, False

    def ended(self, asked: float) -> None:
        """A job has ended now, which was asked to at a time."""
        self._end_s = time.time() - asked

    def resume_point(self) -> str:
        """Return where the run goes on, and which finished steps it repeats, as far as they are
        recorded."""
        saved = progress(self._folder.path)
        done = max((int(step["step"]) + 1 for step in self._folder.last_steps()), default=0)
        where = f"from step {saved}" if saved >= 0 else "from the start"
        first = max(saved, 0) + 1
        return f"{where}; steps {first} to {done} are repeated" if done >= first else where

    def look(self) -> None:
        """See when the first step since the launch was taken, and how fast the first ones are, of
        all ranks; cheap once it is known."""
        if self._first:
            self._knows = self._knows or self.read()
            return
        times = [step["time"] for step in self._folder.last_steps()]
        since = [at for at in times if at > self._launched]
        if since:
            self._first = True
            self._starts.append(min(since) - self._launched)

    def read(self) -> bool:
        """Learn from the records of the job that runs, or ran last; False if they say too little
        yet."""
        content, step_s = self._folder.read_run(), self._step_s()
        hosts = [str(rank.get("host")) for rank in content.get("ranks") or []]
        counts: list[int] = (content.get("plan") or {}).get("counts") or []
        if step_s is None or len(hosts) != len(counts):
            return False
        now = Counter(hosts)
        self._steps[frozenset(now.items())] = step_s
        self._ranks |= now  # the most of each
        self._rates |= {str(each.get("host")): 0.0 for each in content.get("left_out") or []}
        for host, ranks in now.items():
            own = sum(n for name, n in zip(hosts, counts, strict=True) if name == host)
            if own:
                self._rates[host] = own / step_s * self._ranks[host] / ranks
        return True

    def lost(self) -> set[str]:
        """Hosts, by their own names, without a rank of which the job of now has gone on."""
        events = self._folder.read_events()
        return {
            str(event["host"]) for event in events
            if event["event"] == "lost" and event["time"] > self._launched
        }  # fmt: skip

    def training(self) -> set[str]:
        """Hosts, by their own names, of which a rank trains."""
        return {str(rank.get("host")) for rank in self._folder.read_run().get("ranks") or []}

    def speed_without(self, nodes: Collection[str]) -> float | None:
        """What the other hosts did of each step, by the last plan; None where it is not known."""
        content: dict[str, Any] = self._folder.read_run()
        counts: list[int] = (content.get("plan") or {}).get("counts") or []
        hosts = [rank.get("host") for rank in content.get("ranks") or []]
        if not counts or len(hosts) != len(counts):
            return None
        left = sum(n for host, n in zip(hosts, counts, strict=True) if host not in nodes)
        return left / sum(counts)

    def take_back(self, back: Mapping[str, Sequence[Mapping[str, Any]]]) -> TakeBack | None:
        """What it would save to take hosts back now, or lost ranks of theirs; None where that is
        not known yet.

        How fast a host is, is known of when it took part; else of what it remembers; else it is
        thought to be as fast as the others are on average.

        Args:
            back: by a host's own name, the speeds that it remembers.
        """
        self.read()
        content, step_s = self._folder.read_run(), self._step_s()
        last, steps = content.get("last_step"), self._folder.last_steps()
        if step_s is None or not self._starts or not isinstance(last, int):
            return None
        now = Counter(str(rank["host"]) for rank in content["ranks"])
        batch = int(content["plan"]["global_batch"])
        usual = batch / step_s / len(now)
        for node, speeds in back.items():
            self._rates.setdefault(node, _remembered(speeds, content["config"]) or usual)
        whole = now | Counter({node: self._ranks[node] or 1 for node in back})
        rates = [self._rates[node] * (1 - now[node] / whole[node]) for node in back]
        known = self._steps.get(frozenset(whole.items()))
        with_s = known or step_with(batch, step_s, [rate for rate in rates if rate > 0])
        left = max(0, last - int(steps[-1]["step"]) - 1)
        # The first start may have loaded data; and with more hosts it takes longer.
        start_s = max(self._starts[1:] or self._starts)
        return TakeBack(left, step_s, with_s, start_s + self._end_s)

    def _step_s(self) -> float | None:
        """Usual seconds of a step of this start; None if it has taken too few."""
        steps = [step for step in self._folder.last_steps() if step["time"] > self._launched]
        times = [step["time"] for step in steps]
        between = [after - before for before, after in pairwise(times)]
        return median(between) if len(between) >= _FEW and median(between) > 0 else None


def _remembered(speeds: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> float | None:
    """Samples a second of all devices of a host, with a run's options; None: it does not know."""
    fit = [s for s in speeds if all(config.get(k) == v for k, v in s["options"].items())]
    newest = {speed["uuid"]: float(speed["rate"]) for speed in reversed(fit)}
    return sum(newest.values()) or None
