"""The hosts on which keep_training.sh may start a run, because they answer and are not away.

The module also handles hosts that leave automatically (``--polite``), and hosts that come back.
While a job runs without some hosts, the module asks these hosts again. The records of the job's
speed show how much time a returned host would save. If the host saves more time than a new start
costs, the module ends the job, and keep_training.sh starts it with the host.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from motley.cluster.hostfile import Host
from motley.cluster.ssh import run_on_all, split
from motley.errors import HostTrouble, MotleyError
from motley.provision.leave_cn import ASK_S, ask_agent, join_names
from motley.provision.setup_command import run_module
from motley.records.run_folder import RunFolder
from motley.text import typed_command


def step_with(batch: int, step_s: float, rates: Sequence[float]) -> float:
    """Estimate the seconds of a step after more hosts have joined the run.

    The samples per second of the hosts add up, as in a split by speed. The time for exchanging
    gradients is part of ``step_s``, and is not recomputed for more hosts.

    Args:
        batch: samples in a step, over all ranks.
        step_s: seconds of a step now.
        rates: samples per second of each added host.

    Raises:
        MotleyError: a number is not above 0.
    """
    if batch < 1 or step_s <= 0 or any(rate <= 0 for rate in rates):
        raise MotleyError(
            f"a batch of {batch} samples, a step of {step_s} s and rates of {rates} samples/s "
            "have to be above 0"
        )
    return batch / (batch / step_s + sum(rates))


@dataclass(frozen=True)
class ReadmissionEstimate:
    """The estimated seconds that a readmission saves and costs.

    In a readmission, the job ends and starts again with hosts that were missing.

    Attributes:
        steps: number of steps left in the run.
        step_s: seconds of a step now.
        with_s: seconds of a step with the returned hosts.
        cost_s: seconds without training, while the job ends and starts again.
    """

    steps: int
    step_s: float
    with_s: float
    cost_s: float

    @property
    def saves_s(self) -> float:
        """Seconds saved in the rest of the run."""
        return self.steps * (self.step_s - self.with_s)

    @property
    def worth_it(self) -> bool:
        """True if the run ends sooner with the readmission than without it."""
        return self.saves_s > self.cost_s

    def sentence(self) -> str:
        """Return a sentence for the user that states the estimate."""
        saved = f"{self.saves_s:.0f} s" if self.saves_s > 0 else "nothing"
        return (
            f"that saves {saved} of the {self.steps * self.step_s:.0f} s left ({self.steps} "
            f"steps of {self.step_s:.3g} s now, or {self.with_s:.3g} s afterwards), and a new "
            f"start costs {self.cost_s:.0f} s"
        )


QUIET_S = 300.0  # seconds without other users before a host comes back with --polite
_AGAIN_S = 60.0  # seconds before the watching process is started again on a host that was lost
_NO_END_S = 1e9


@dataclass(frozen=True)
class HostAnswers:
    """The answers of all hosts to the question whether they can take part in a start.

    Attributes:
        alive: hosts that can take part, in the hostfile's order.
        lost: for each host that does not answer, the reason.
        away: for each host that is marked as away, a text with the reason or the end of the
            absence.
        ends: times at which the absence of hosts ends, in seconds since 1970. Absences without
            an end are left out.
        nodes: for each host, the host name that the machine itself reports. Records of runs use
            this name.
        sees: for each host, True if the host can read the run's folder.
        speeds: stored speeds of the devices, by the host name that the machine reports; see
            host_agent.speeds.
    """

    alive: tuple[Host, ...]
    lost: dict[str, str]
    away: dict[str, str]
    ends: tuple[float, ...]
    nodes: dict[str, str]
    sees: dict[str, bool]
    speeds: dict[str, list[dict[str, Any]]]

    @property
    def missing(self) -> frozenset[str]:
        """Names of the hosts that cannot take part: lost hosts and hosts that are away."""
        return frozenset(self.lost) | frozenset(self.away)


def ask(hosts: Sequence[Host], folder: Path, unwanted: frozenset[str] = frozenset()) -> HostAnswers:
    """Ask all hosts at once, and return their answers.

    The call takes as long as the slowest host.

    Args:
        hosts: the hosts.
        folder: folder of the run.
        unwanted: names of hosts that take no part, whatever they answer.
    """
    place = folder.absolute()
    result, troubles = split(run_on_all([h.name for h in hosts], lambda h: _ask(h, place), ASK_S))
    lost = {name: trouble.found for name, trouble in troubles.items()}
    lost |= dict.fromkeys(unwanted, "no step was taken with this host")
    marks = {name: text["away"] for name, text in result.items() if text.get("away")}
    away = {name: _why(mark) for name, mark in marks.items() if name not in lost}
    return HostAnswers(
        tuple(host for host in hosts if host.name not in {*lost, *away}), lost, away,
        tuple(mark["until"] for mark in marks.values() if mark["until"]),
        {name: str(text.get("node", name)) for name, text in result.items()},
        {name: bool(text.get("sees")) for name, text in result.items()},
        {str(text.get("node", name)): text.get("speeds", []) for name, text in result.items()},
    )  # fmt: skip


def _ask(host: str, folder: Path) -> dict[str, Any]:
    try:
        return ask_agent(host, "ask", folder, limit=ASK_S)
    except HostTrouble as trouble:
        if trouble.kind in ("no environment", "check failed"):  # mpirun will report the fault
            return {}
        raise


def _why(mark: dict[str, Any]) -> str:
    return f" ({mark['polite']})" if mark["polite"] else str(mark["words"])


def be_polite(hosts: Sequence[Host]) -> None:
    """Have each host leave the run whenever another user needs the host, from now on.

    A process on each host watches for other users, and ends with this process.
    """
    for host in hosts:
        threading.Thread(target=_be_polite, args=(host.name,), daemon=True).start()


def _be_polite(host: str) -> None:
    while True:
        try:
            run_module(host, "motley.membership.host_agent", "polite", QUIET_S, limit=_NO_END_S)
        except HostTrouble:
            time.sleep(_AGAIN_S)


def print_now(text: str) -> None:
    """Print a text for the user at once."""
    print(f"keep_training: {typed_command(text)}", file=sys.stderr, flush=True)


_FEW = 4  # least intervals between steps for a usual time


def progress(folder: Path) -> int:
    """Return the step of the newest checkpoint in a run's folder; -1 without a checkpoint."""
    names = (path.name.removeprefix("step_") for path in (folder / "checkpoints").glob("step_*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


class Figures:
    """The speed of one run, from the records of all its starts.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)
        # Samples per second of all ranks of a host, by its own name; 0 if the plan has left the
        # host out. The next attribute has the number of these ranks.
        self._rates: dict[str, float] = {}
        self._ranks = Counter[str]()
        self._steps: dict[
            frozenset[tuple[str, int]], float
        ] = {}  # seconds of a step, by the hosts that train and their numbers of ranks
        self._launched = 0.0
        self._starts: list[float] = []  # seconds from each launch to its first step
        self._end_s = 0.0  # seconds from the request to end the job to its end

    def launched(self) -> None:
        """Record that the launcher of the job is started now."""
        self._launched, self._first, self._knows = time.time(), False, False

    def ended(self, asked: float) -> None:
        """Record that a job has ended now.

        The end was requested at the time ``asked``, in seconds since 1970.
        """
        self._end_s = time.time() - asked

    def resume_point(self) -> str:
        """Return a phrase that names the step at which the run continues, and the repeated steps.

        Steps after the checkpoint are repeated. Only recorded steps are counted.
        """
        saved = progress(self._folder.path)
        done = max((int(step["step"]) + 1 for step in self._folder.last_steps()), default=0)
        where = f"from step {saved}" if saved >= 0 else "from the start"
        first = max(saved, 0) + 1
        return f"{where}; steps {first} to {done} are repeated" if done >= first else where

    def look(self) -> None:
        """Record the time from the launch to the first step, and the speed of the first steps.

        Once both are recorded, a call reads no file.
        """
        if self._first:
            self._knows = self._knows or self.read()
            return
        times = [step["time"] for step in self._folder.last_steps()]
        since = [at for at in times if at > self._launched]
        if since:
            self._first = True
            self._starts.append(min(since) - self._launched)

    def read(self) -> bool:
        """Read the records of the running or last job. Return False after too few steps."""
        content, step_s = self._folder.read_run(), self._step_s()
        hosts = [str(rank.get("host")) for rank in content.get("ranks") or []]
        counts: list[int] = (content.get("plan") or {}).get("counts") or []
        if step_s is None or len(hosts) != len(counts):
            return False
        now = Counter(hosts)
        self._steps[frozenset(now.items())] = step_s
        self._ranks |= now  # the larger number for each host
        self._rates |= {str(each.get("host")): 0.0 for each in content.get("left_out") or []}
        for host, ranks in now.items():
            own = sum(n for name, n in zip(hosts, counts, strict=True) if name == host)
            if own:
                self._rates[host] = own / step_s * self._ranks[host] / ranks
        return True

    def lost(self) -> set[str]:
        """Return the hosts whose ranks this job has lost, by the names that the hosts report."""
        events = self._folder.read_events()
        return {
            str(event["host"]) for event in events
            if event["event"] == "lost" and event["time"] > self._launched
        }  # fmt: skip

    def training(self) -> set[str]:
        """Return the hosts on which a rank trains, by the names that the hosts report."""
        return {str(rank.get("host")) for rank in self._folder.read_run().get("ranks") or []}

    def speed_without(self, nodes: Collection[str]) -> float | None:
        """Return the fraction of a step's samples that the hosts other than ``nodes`` compute.

        None: no plan is recorded yet.

        The last recorded plan of the run gives the fraction.

        Args:
            nodes: hosts to leave out, by the names that the machines report.
        """
        content: dict[str, Any] = self._folder.read_run()
        counts: list[int] = (content.get("plan") or {}).get("counts") or []
        hosts = [rank.get("host") for rank in content.get("ranks") or []]
        if not counts or len(hosts) != len(counts):
            return None
        remaining = sum(n for host, n in zip(hosts, counts, strict=True) if host not in nodes)
        return remaining / sum(counts)

    def take_back(
        self, back: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> ReadmissionEstimate | None:
        """Estimate the seconds that the run saves if returned hosts or ranks are added now.

        Return None while the saving is unknown. The speed of a host is its measured speed in this
        run. A host without a measured speed has its stored speed. A host without a stored speed has
        the average speed of the other hosts.

        Args:
            back: stored speeds of the devices of each returned host, by the name that the machine
                reports.
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
        remaining = max(0, last - int(steps[-1]["step"]) - 1)
        # The first start may have loaded data, and a start with more hosts takes longer.
        start_s = max(self._starts[1:] or self._starts)
        return ReadmissionEstimate(remaining, step_s, with_s, start_s + self._end_s)

    def _step_s(self) -> float | None:
        """Return the usual seconds of a step since this start; None after too few steps."""
        steps = [step for step in self._folder.last_steps() if step["time"] > self._launched]
        times = [step["time"] for step in steps]
        between = [after - before for before, after in pairwise(times)]
        return median(between) if len(between) >= _FEW and median(between) > 0 else None


def _remembered(speeds: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> float | None:
    """Return a host's stored samples/s, summed over its devices; None: unknown.

    Only speeds that were measured with the options in ``config`` count.
    """
    fit = [s for s in speeds if all(config.get(k) == v for k, v in s["options"].items())]
    newest = {speed["uuid"]: float(speed["rate"]) for speed in reversed(fit)}
    return sum(newest.values()) or None


ASK_AGAIN_S = 60.0  # seconds between questions to missing hosts
_NOT_YET_S = 5.0  # seconds between estimates while the usual time of a step is unknown


def until_asked_s(asked: HostAnswers) -> float:
    """Return the seconds until missing hosts are asked again.

    If the absence of a host ends earlier, return the seconds until then. The result is at least 1.
    """
    return max(1.0, min([ASK_AGAIN_S, *(end - time.time() + 0.5 for end in asked.ends)]))


class Returns:
    """The watch for returning hosts during one job.

    Args:
        folder: folder of the run.
        figures: measured durations of the run's steps and starts.
        asked: answers of the hosts before the start.
        ask: function that asks all hosts again, and returns their answers.
    """

    def __init__(
        self, folder: Path, figures: Figures, asked: HostAnswers, ask: Callable[[], HostAnswers]
    ) -> None:
        self._folder, self._figures, self._ask = folder, figures, ask
        self._missing, self._nodes = asked.missing, asked.nodes
        self._due = time.monotonic() + until_asked_s(asked)
        self._answers: list[HostAnswers] = []
        self._thread: threading.Thread | None = None
        self._paused = 0.0  # time of the request to end the job; 0: none
        self._told = frozenset[str]()

    def look(self) -> None:
        """Ask the missing hosts once a minute, and act on their answers, without waiting."""
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
                self._take_answer(self._answers.pop())

    def ended(self) -> None:
        """Record that the job has ended."""
        if self._paused:
            self._figures.ended(self._paused)

    def _question(self) -> None:
        self._answers = [self._ask()]

    def _take_answer(self, asked: HostAnswers) -> None:
        self._due = time.monotonic() + until_asked_s(asked)
        back = self._missing - asked.missing
        if not back:
            return
        nodes = {name: asked.nodes.get(name, name) for name in sorted(back)}
        gain = self._figures.take_back(
            {node: asked.speeds.get(node, []) for node in nodes.values()}
        )
        trains = self._figures.training()  # such a host has only lost some ranks
        words = [f"the rest of {name}" if nodes[name] in trains else name for name in nodes]
        names = join_names(words)
        if gain is None:
            self._due = time.monotonic() + _NOT_YET_S
        elif not gain.worth_it:
            if back != self._told:
                print_now(f"{names} can be reached again, but will not rejoin: {gain.sentence()}")
            self._told = back
        elif self._pause([h.name for h in asked.alive if asked.nodes.get(h.name) in trains]):
            print_now(f"{names} will rejoin after this step: {gain.sentence()}")

    def _pause(self, hosts: Collection[str]) -> bool:
        """Have the job save and end at a step boundary. Return True if a rank got the request.

        The signal is sent to the ranks directly. mpirun would also send it to processes that the
        ranks have started, such as compilers, and the signal would end these processes.
        """
        requested = time.time()
        words = ("pause", str(self._folder.parent), self._folder.name)
        received, _ = split(run_on_all(hosts, lambda host: ask_agent(host, *words), ASK_S))
        if any(answer.get("asked") for answer in received.values()):
            self._paused = requested
        return bool(self._paused)
