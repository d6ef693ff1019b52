"""The fault matrix: each fault is done to a real run, and what the user sees is judged.

    sudo .venv/bin/python benchmarks/faults.py --json benchmarks/results/faults.json  # all rows
    sudo .venv/bin/python benchmarks/faults.py --only rank-killed --only launcher-killed
    .venv/bin/python benchmarks/faults.py --quick                   # a few rows, no lab, no root
    .venv/bin/python benchmarks/faults.py --list
    sudo .venv/bin/python benchmarks/faults.py --random 10 --seed 3 # faults by chance, on a lab

Real mpirun, sshd, signals and links, on this machine and on the lab in a box (which needs root).
Writes FILE of --json, and the same as a page beside it; with --only, what else is in FILE stays.
Exit status: 0 all rows are ok, 1 some are not.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fault_rows_disks  # noqa: F401  # each adds its rows
import fault_rows_files  # noqa: F401
import fault_rows_hostile  # noqa: F401
import fault_rows_hosts  # noqa: F401
import fault_rows_launch  # noqa: F401
import fault_rows_ranks  # noqa: F401
import fault_rows_strangers  # noqa: F401
import result
from bench_lab import BenchLab, bench_lab
from fault_lab import LabPlace
from fault_places import Place, machine
from fault_random import RandomFaults
from fault_row import ROWS, Row, Seen
from fault_table import table

HOSTS = tuple(f"fault{number}" for number in range(5))
PROFILE = "".join(
    f'[[host]]\nname = "{name}"\naddress = "10.97.98.{number}/24"\n'
    for number, name in enumerate(HOSTS, 1)
)


class Places:
    """Makes a place for each row; a lab is made once, and only if a row needs it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self._lab: BenchLab | None = None

    @contextmanager
    def of(self, name: str, hosts: int) -> Iterator[Place]:
        """For one row; all that it started is ended, and its files are gone.

        Args:
            hosts: of the lab; 0: this machine.
        """
        folder = self._folder / name
        if not hosts:
            with machine(folder) as place:
                yield place
            return
        if self._lab is None:
            self._lab = self._stack.enter_context(bench_lab(PROFILE))
        place = LabPlace(folder, self._lab, HOSTS[:hosts])
        try:
            yield place
        finally:
            place.end()


class OverdueError(Exception):
    """A row took longer than it may."""


def _overdue(number: int, frame: object) -> None:
    raise OverdueError


def play(row: Row, places: Places) -> Seen:
    """Play one row; whatever it raises is a thing that is wrong."""
    seen = Seen()
    signal.signal(signal.SIGALRM, _overdue)
    try:
        with places.of(row.name, row.lab) as place:
            signal.alarm(row.limit_s)
            try:
                row.play(place, seen)
            finally:
                signal.alarm(0)
    except OverdueError:
        seen.wrong.append(f"not over within {row.limit_s} s")
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            raise  # a signal to this program
        traceback.print_exc()
        seen.wrong.append(f"{type(error).__name__}: {str(error)[:200] or 'no message'}")
    return seen


def play_all(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One after another."""
    made = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="motley-faults-"))
        places = Places(stack, Path(folder))
        for row in rows:
            print(f"{row.name}: {row.fault}", flush=True)
            began = time.monotonic()
            seen = play(row, places)
            made.append({**row.as_json(seen), "seconds": round(time.monotonic() - began, 1)})
            print(f"  {seen.line or '(no line)'}\n  {made[-1]['verdict']}", flush=True)
    return made


def play_random(count: int, seed: int, hosts: int) -> list[dict[str, Any]]:
    """So many faults by chance, on one run."""
    made = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="motley-faults-"))
        places = Places(stack, Path(folder))
        with places.of("random", hosts) as place:
            assert isinstance(place, LabPlace)
            faults = RandomFaults(place, count, seed)
            stack.callback(faults.end)
            for each in faults.play():
                made.append(each)
                print(f"{each['row']}: {each['fault']}\n  {each['line']}\n  {each['verdict']}",
                      flush=True)  # fmt: skip
    return made


def merged(made: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """These rows, and those of an earlier result that were not played again."""
    old = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = {each["row"]: each for each in [*old, *made]}
    return [rows[name] for name in ROWS if name in rows]


def main() -> int:
    """Play, show, write."""
    options = arguments()
    if options.list:
        for each in ROWS.values():
            print(f"{each.name:<28} {'lab' if each.lab else '   '}  {each.fault}: {each.right}")
        return 0
    rows = [ROWS[name] for name in options.only] or [
        each for each in ROWS.values() if not options.quick or (each.quick and not each.lab)
    ]
    for number in (signal.SIGTERM, signal.SIGINT):  # what was started ends, whoever ends us
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    started = time.time()
    made = (
        play_random(options.random, options.seed, options.hosts) if options.random
        else play_all(rows)
    )  # fmt: skip
    wrong = [each["row"] for each in made if each["verdict"] != "ok"]
    print(f"{len(made) - len(wrong)} of {len(made)} ok" + "".join(f"\n  not: {w}" for w in wrong))
    if options.json:
        made = merged(made, options.json) if options.only else made
        result.write(options.json, made, started)
        options.json.with_suffix(".md").write_text(table(made, started))
    return int(bool(wrong))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=ROWS, default=[], metavar="ROW")
    parser.add_argument("--quick", action="store_true", help="what takes seconds, no lab")
    parser.add_argument("--list", action="store_true", help="the rows, and what is right")
    parser.add_argument("--random", type=int, metavar="N", help="so many faults by chance")
    parser.add_argument("--seed", type=int, default=0, help="of --random, default 0")
    parser.add_argument("--hosts", type=int, default=4, choices=range(3, 6),
                        help="of --random, default 4")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
