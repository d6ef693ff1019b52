"""Faults by chance, on one run of a lab under keep_training.sh; a seed makes a failure repeat."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fault_disk import fill, share, small_disk
from fault_job import until
from fault_lab import LabPlace
from fault_row import Row, Seen
from fault_story import RESCUE, Story, reference
from result import ROOT

KINDS = ("kill", "stop", "cut", "freeze", "off", "launcher", "disk", "leave", "join")
_STEPS = 40  # a fault, on average 20 apart; what is left is trained in peace
_JOIN_STEPS = 450  # more, until a host that was away is asked
# Rounding that differs by the ranks grows with each step, to 1 % after 300 at the usual rate.
_SLOWLY = ("--lr", 1e-5)
_DISK_KIB = 96 << 10
_GOES_ON_S = 180.0  # 15 s until it is silent, 30 until mpirun lets go, and a launch
_BACK_S = 180.0  # hosts that were away are asked once a minute
_HARM = {"cut": "cut", "freeze": "freeze", "off": "kill"}  # lab.sh's words


@dataclass(frozen=True)
class Chance:
    """One fault.

    Attributes:
        kind: of KINDS; who joins has left before. steps: that are trained before it.
        whom: which of those that take part, as a part of 1.
    """

    kind: str
    steps: int
    whom: float


def chances(count: int, seed: int) -> list[Chance]:
    """The same for the same seed."""
    choose = random.Random(seed)
    return [
        Chance(choose.choice(KINDS), choose.randint(8, 32), choose.random()) for _ in range(count)
    ]


class RandomFaults:
    """One after another, on one run."""

    def __init__(self, place: LabPlace, count: int, seed: int) -> None:
        self._place, self._seed, self._chances = place, seed, chances(count, seed)
        joins = sum(chance.kind == "join" for chance in self._chances)
        self._steps = _STEPS * (count + 2) + _JOIN_STEPS * joins
        self._seen = Seen()  # of the whole
        reference(place, self._steps, _SLOWLY)
        self._disk = small_disk(place.folder / "disk", _DISK_KIB)
        place.lab.on_head("mkdir -p ~/logs")
        place.logs = self._disk
        self._share(place.hosts)
        self._words = ("--max-steps", self._steps, *_SLOWLY)
        self._story = Story(place, self._seen, len(place.hosts), *self._words, keep=True)

    def _share(self, hosts: Sequence[str]) -> None:
        """Hosts have their logs on a disk that can be full."""
        for host in hosts:
            share(self._disk, self._place.first_process(host), f"{self._place.home}/logs")

    def end(self) -> None:
        """Take the disk away."""
        subprocess.run(["umount", "-l", str(self._disk)], check=True)

    def play(self) -> Iterator[dict[str, Any]]:
        """A row for each, and one for the whole."""
        self._story.reach(33)  # there is a checkpoint
        for number, chance in enumerate(self._chances):
            seen = Seen()
            name = f"random-{self._seed}-{number}"
            what = self._one(chance, seen)
            yield Row(name, what, "the first cause is right; goes on", len(self._place.hosts),
                      False, 0, lambda place, seen: None).as_json(seen)  # fmt: skip
            if self._story.job.process.poll() is not None:
                break
        yield self._whole()

    def _one(self, chance: Chance, seen: Seen) -> str:
        story, place = self._story, self._place
        first = len(story.steps())
        until(lambda: len(story.steps()) >= first + chance.steps or self._ended(), 90)
        until(lambda: len(place.ranks()) >= 2 or self._ended(), 60)
        began = len(story.steps())
        harmed = time.time()
        if chance.kind in (*_HARM, "leave", "join") and not self._others():
            chance = replace(chance, kind="launcher")  # the head is alone: nobody was worth a start
        what, says = self._harm(chance)
        if chance.kind == "disk":  # it is for a person to free some, and to start it again
            until(self._ended, 60)
            (self._disk / "filler").unlink()
            text = [*story.job.said(harmed - 0.05)]
            story.job = place.start("x", len(place.hosts), *self._words, keep=True)
            story.job.lines[:0] = text
        goes_on = until(lambda: self._after(harmed, began) or self._ended(), _GOES_ON_S)
        lines = story.job.said(harmed - 0.05)
        ours = [line for line in lines if line.text.startswith("motley: ")]
        causes = [line for line in ours if not line.text.startswith(RESCUE)]
        # Between two starts there is nobody to lose, and a leaving host is said by one line alone.
        causes = causes or [line for line in lines if line.text.startswith("keep_training: ")]
        if seen.expect(bool(causes), "no line of ours"):
            seen.line = place.tidy(causes[0].text)
            seen.first_word_s = causes[0].time - harmed
            between = seen.line.startswith("keep_training: ")
            seen.expect(between or says in seen.line, f"the line lacks {says!r}")
        seen.expect(goes_on and not self._ended(), "it does not go on")
        if chance.kind in ("leave", "join"):
            host, *_ = says.split()
            self._setup("join_cn", host)
        if chance.kind == "join":
            seen.expect(until(lambda: self._is_back(host, harmed), _BACK_S), "it is not back")
        later = [step["time"] for step in story.steps().values() if step["time"] > harmed + 1]
        seen.next_step_s = min(later) - harmed if later else None
        off = place.restore()
        self._share(off)
        return what

    def _setup(self, script: str, host: str) -> None:
        """One of setup's scripts, for a host."""
        line = f"cd {ROOT} && bash setup/{script}.sh --hostfile ~/hosts.txt {host}"
        job = self._place.on(self._place.hosts[0], line)
        assert job.wait(60) == 0, job.output

    def _is_back(self, host: str, since: float) -> bool:
        """Or it is said that this is not worth it any more."""
        message = [line.text for line in self._story.job.said(since)]
        return any(
            text.startswith(f"keep_training: {host} is") and "back" in text for text in message
        )

    def _ended(self) -> bool:
        return self._story.job.process.poll() is not None

    def _after(self, harmed: float, began: int) -> bool:
        """A few steps by those who go on: after a word of keep_training.sh."""
        text = [line.time for line in self._story.job.said(harmed)] or [time.time()]
        times = [step["time"] for step in self._story.steps().values()]
        return sum(at > max(text) for at in times) > 3

    def _others(self) -> list[str]:
        """Hosts that train besides the first."""
        place = self._place
        return sorted({place.host_of(pid) for pid in place.ranks().values()} - {place.hosts[0]})

    def _harm(self, chance: Chance) -> tuple[str, str]:
        """Do it; what was done, and what our line should hold."""
        place, ranks = self._place, self._place.ranks()
        if chance.kind == "launcher":
            os.kill(place.named("prterun")[0], signal.SIGKILL)
            return "mpirun is killed", "the launcher"
        if chance.kind == "disk":
            fill(self._disk)
            return "the disk is full", "free some space"  # at a start there is no room
        if chance.kind in ("kill", "stop"):
            rank = _chosen(sorted(ranks), chance.whom)
            host = place.host_of(ranks[rank])
            number = signal.SIGKILL if chance.kind == "kill" else signal.SIGSTOP
            os.kill(ranks[rank], number)
            return f"rank {rank} on {host}: {number.name}", f"rank {rank} on {host}"
        host = _chosen(self._others(), chance.whom)
        if chance.kind in ("leave", "join"):
            self._setup("leave_cn", host)
            what = "leave, and join" if chance.kind == "join" else "leave"
            return f"{host}: {what}", f"{host} leaves"
        place.harm(_HARM[chance.kind], host)
        return f"{host}: {chance.kind}", host

    def _whole(self) -> dict[str, Any]:
        seen, story = self._seen, self._story
        code = story.job.wait(120 + self._steps)
        seen.said = [self._place.tidy(line.text) for line in story.job.said()]
        seen.line = seen.said[-1] if seen.said else ""
        seen.expect(code == 0, f"exit status {code}")
        seen.expect(len(story.steps()) == self._steps, f"{len(story.steps())} steps")
        story.judge_records(None, "finished", {})
        story.judge_losses()
        self._place.restore()
        story.judge_left()
        what = f"{len(self._chances)} random faults, seed {self._seed}"
        right = "ends by itself; losses of an unbroken run, nothing left"
        return Row(f"random-{self._seed}", what, right, len(self._place.hosts), False, 0,
                   lambda place, seen: None).as_json(seen)  # fmt: skip


def _chosen(among: Sequence[Any], whom: float) -> Any:
    return among[int(whom * len(among))]
