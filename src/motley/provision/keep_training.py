"""The door of setup/keep_training.sh; its -h explains it."""

import argparse
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from motley.errors import MotleyError
from motley.provision.keep_returns import ask, be_polite
from motley.provision.keeper import CODES, Keeper, Stop
from motley.provision.launch_line import LaunchLine
from motley.provision.setup_command import run
from motley.records.folder_lock import take_folder
from motley.records.run_folder import RunFolder


class Options(argparse.ArgumentParser):
    """Those before the line."""

    def error(self, message: str) -> NoReturn:
        """Raise MotleyError."""
        raise MotleyError(f"{message}; see bash setup/keep_training.sh -h")


def main(words: Sequence[str]) -> int:
    """Run the line until it has ended well, or going on makes no sense."""
    parser = Options(prog="keep_training.sh", allow_abbrev=False, add_help=False)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--polite", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("line", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if options.restarts < 0:
        raise MotleyError(f"--restarts {options.restarts} is less than 0")
    line = LaunchLine.parse(options.line)
    if options.polite and not line.hosts:
        raise MotleyError(
            "--polite watches the hosts of a hostfile, and the line names none; add one, as in "
            "--hostfile hosts.txt, or leave --polite out"
        )
    line = line.named(time.strftime("%Y-%m-%d_%H-%M-%S"))
    if options.dry_run:
        asked = ask(line.hosts, line.folder)
        for host, why in asked.lost.items():
            print(f"{host} does not answer: {why}")
        for host, why in asked.away.items():
            print(f"{host} is away{why}")
        print(" ".join(line.with_hosts(asked.alive, Path("HOSTS")).words))
        return 0
    if RunFolder(line.folder).read_run().get("status") == "finished":
        print(f"{line.folder} is finished already; choose another --run NAME")
        return 0
    line.folder.parent.mkdir(parents=True, exist_ok=True)
    place = line.folder.parent / f".keep.{line.folder.name}"
    place.mkdir(exist_ok=True)
    busy = f"{line.folder} is kept alive by another keep_training.sh"
    with take_folder(place, busy, "stop it first, or choose another --run NAME"):
        stop = Stop()
        for each in CODES:
            signal.signal(each, stop)
        if options.polite:
            be_polite(line.hosts)
        try:
            return Keeper(line, options.restarts, stop).run()
        finally:
            (place / ".lock").unlink(missing_ok=True)
            place.rmdir()


if __name__ == "__main__":
    run(main)
