"""The door of setup/keep_training.sh; its -h explains it."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from cn import run
from launch_line import LaunchLine

from motley.cluster.fan_out import run_on_all, split
from motley.cluster.hostfile import Host
from motley.cluster.ssh import connect
from motley.errors import MotleyError
from motley.faults import FaultKind
from motley.launch.process import die_with_parent
from motley.launch.survivors import SURVIVE
from motley.records.folder_lock import take_folder
from motley.records.run_folder import RunFolder

_ASK_S = 15.0  # in which a host answers, or ssh has given up
_NO_MACHINE = {  # of faults that would come again with any machines
    FaultKind.NOT_FINITE: "the loss or gradient is not finite, which no machine is to blame for",
    FaultKind.REFUSED: "what it says is for you to change",
    FaultKind.STOPPED: "somebody has stopped it",
}
_CODE = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass
class Stop:
    """What the user has asked for by a signal.

    Attributes:
        number: of it; 0: nothing.
    """

    number: int = 0
    job: subprocess.Popen[bytes] | None = None

    def __call__(self, number: int, _: object) -> None:
        self.number = number
        # Ctrl-C reaches mpirun from the terminal; what is sent to this process alone is passed on.
        if self.job is not None and number == signal.SIGTERM:
            self.job.send_signal(number)


class Options(argparse.ArgumentParser):
    """Those before the line."""

    def error(self, message: str) -> NoReturn:
        """Raise MotleyError."""
        raise MotleyError(f"{message}; see bash setup/keep_training.sh -h")


def main(words: Sequence[str]) -> int:
    """Run the line until it has ended well, or going on makes no sense."""
    parser = Options(prog="keep_training.sh", allow_abbrev=False, add_help=False)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("line", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if options.restarts < 0:
        raise MotleyError(f"--restarts {options.restarts} is less than 0")
    line = LaunchLine.parse(options.line).named(time.strftime("%Y-%m-%d_%H-%M-%S"))
    if options.dry_run:
        alive, lost = living(line.hosts)
        print(*(f"{host} does not answer: {why}" for host, why in lost.items()), sep="\n", end="")
        print(" ".join(line.with_hosts(alive, Path("HOSTS")).words))
        return 0
    if RunFolder(line.folder).read_run().get("status") == "finished":
        print(f"{line.folder} is finished already; choose another --run NAME")
        return 0
    line.folder.parent.mkdir(parents=True, exist_ok=True)
    place = line.folder.parent / f".keep.{line.folder.name}"
    place.mkdir(exist_ok=True)
    busy = f"{line.folder} is kept alive by another keep_training.sh"
    with take_folder(place, busy, "stop it first, or choose another --run NAME"):
        try:
            return keep(line, options.restarts)
        finally:
            (place / ".lock").unlink(missing_ok=True)
            place.rmdir()


def keep(line: LaunchLine, restarts: int) -> int:
    """See :func:`main`."""
    stop, faults, missing = Stop(), 0, frozenset[str]()
    for each in _CODE:
        signal.signal(each, stop)
    for number in range(sys.maxsize):
        alive, lost = living(line.hosts)
        say_who(line, missing, lost)
        missing = frozenset(lost)
        if line.hosts and not alive:
            raise MotleyError("no host answers; see bash setup/test_cn_connection.sh")
        before = progress(line.folder)
        with tempfile.TemporaryDirectory(prefix="motley-keep-") as folder:
            now = line.with_hosts(alive, Path(folder) / "hosts.txt")
            code = start(now.resumed() if number or before >= 0 else now, stop)
        if stop.number:
            say(f"stopped by you; go on with the same line and --run {line.folder.name}")
            return _CODE[signal.Signals(stop.number)]
        content = RunFolder(line.folder).read_run()
        if content.get("status") == "finished":
            if number:
                say(f"finished, after {number} restarts")
            return 0
        failure = content.get("failure") or {}
        kind = failure.get("kind", "")
        if content and kind in set(_NO_MACHINE):
            say(f"does not start it again: {_NO_MACHINE[FaultKind(kind)]}")
            return code or 1
        done = progress(line.folder)
        faults = 1 if done > before else faults + 1
        gone = living(line.hosts)[1].keys() - missing
        if faults > restarts or (not content and not gone):
            why = (
                "it ended before it had begun, and all hosts answer" if not content
                else f"{faults} faults in a row, and no step in between" if restarts
                else "--restarts 0"
            )  # fmt: skip
            say(f"gives up: {why}")
            return code or 1
        where = f"from step {done}" if done >= 0 else "from the start"
        what = f"rank {failure['rank']} on {failure['host']}" if failure else "the launcher"
        say(f"{what} was lost ({kind or 'without a word'}); it goes on {where}")
    return 1


def say_who(line: LaunchLine, before: frozenset[str], lost: dict[str, str]) -> None:
    """Who has gone since the last start, and who is back."""
    count = len(line.hosts)
    part = speed_of(line, lost)
    for host in lost.keys() - before:
        speed = "" if part is None else f", about {part:.2f} of the speed"
        say(f"{host} is gone ({lost[host]}); on with {count - len(lost)} of {count} hosts{speed}")
    for host in sorted(before - lost.keys()):
        say(f"{host} is back; on with {count - len(lost)} of {count} hosts")


def speed_of(line: LaunchLine, lost: Collection[str]) -> float | None:
    """What the others did of each step, by the last plan; None where that is not known."""
    content: dict[str, Any] = RunFolder(line.folder).read_run()
    counts: list[int] = (content.get("plan") or {}).get("counts") or []
    hosts = [rank.get("host") for rank in content.get("ranks") or []]
    if not counts or len(hosts) != len(counts):
        return None
    left = sum(n for host, n in zip(hosts, counts, strict=True) if host not in lost)
    return left / sum(counts)


def start(line: LaunchLine, stop: Stop) -> int:
    """Run a line to its end; its status."""
    job = subprocess.Popen(
        line.words, env={**os.environ, **SURVIVE},
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )  # fmt: skip
    stop.job = job
    try:
        return job.wait()
    finally:
        stop.job = None


def progress(folder: Path) -> int:
    """The step of a run's newest checkpoint; -1: there is none."""
    names = (path.name.removeprefix("step_") for path in (folder / "checkpoints").glob("step_*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def living(hosts: Sequence[Host]) -> tuple[list[Host], dict[str, str]]:
    """Hosts that answer, and what was found of the others."""
    _, lost = split(run_on_all([host.name for host in hosts], _ask, _ASK_S))
    return [host for host in hosts if host.name not in lost], {
        name: trouble.found for name, trouble in lost.items()
    }


def _ask(host: str) -> None:
    connect(host).close()


def say(text: str) -> None:
    """To the user, at once."""
    print(f"keep_training: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
