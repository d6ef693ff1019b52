"""What plots/watch.py costs the run that it shows: it is stopped and goes on by turns.

    .venv/bin/python benchmarks/watch_cost.py --json benchmarks/results/watch_cost.json
    .venv/bin/python benchmarks/watch_cost.py --quick --json /tmp/watch_cost.json
    python benchmarks/watch_cost.py --ranks 1 --step-s 0.04 --model vit_base_patch16_224

The hardest case: two ranks that compute on all of the processors that the view is drawn by, in
steps of some 30 ms. The view has a terminal of its own, 120 x 30. Signals stop it for a second and
let it go on for a second, in which it looks once at all files and three times at one; in pairs
whose order changes, all within one run, for two runs, and even two minutes, are further apart than
what is looked for. A pair's cost is how many steps fewer were taken while it was watched; the
result is the median of all pairs, and its standard error. Where other users of the machine make
that too coarse, Linux tells more closely what can be lost: for how long the ranks were ready to
compute, and waited for a processor (/proc/PID/task/TID/schedstat). A delay of one rank delays all,
so those of both are added up. All other options are those of the training script: so it is measured
where a GPU computes.
"""

import argparse
import itertools
import os
import pty
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import result
from real_run import lines_of, real_run
from single_gpu import machine

PART_S = 1.0  # between two looks


class View:
    """The view of a run, in a terminal of its own; a context manager, behind which it is gone, also
    where it was stopped."""

    def __init__(self, folder: Path) -> None:
        screen, keyboard = pty.openpty()
        threading.Thread(target=drain, args=(screen,), daemon=True).start()
        self._process = subprocess.Popen(
            [sys.executable, result.ROOT / "plots/watch.py", folder],
            stdin=keyboard, stdout=keyboard, stderr=keyboard, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30",
                 "PYTHONPATH": str(result.ROOT / "src")},
        )  # fmt: skip

    def part(self, watched: bool, ranks: list[Path]) -> tuple[float, float, float]:
        """A part in which it looks, or does not: when it began and ended, and for how long
        the ranks waited for a processor, of each second."""
        before, began = waited_s(ranks), time.time()
        self._process.send_signal(signal.SIGCONT if watched else signal.SIGSTOP)
        time.sleep(PART_S)
        if self._process.poll() is not None:
            raise SystemExit("plots/watch.py has ended")
        ended = time.time()
        return began, ended, (waited_s(ranks) - before) / (ended - began)

    def cpu_s(self) -> float:
        """Processor time that it has taken."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def drain(screen: int) -> None:
    """Read what is drawn, and forget it."""
    try:
        while os.read(screen, 65536):
            pass
    except OSError:  # the view has ended
        pass


def ranks_of(run: Path) -> list[Path]:
    """Folders in /proc of the threads that train."""
    results = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"motley.launch" in words and str(run.parent).encode() in words:
            results.append(process / "task" / process.name)
    return results


def waited_s(ranks: list[Path]) -> float:
    """For how long they have waited for a processor, seconds of all."""
    return sum(int((each / "schedstat").read_text().split()[1]) for each in ranks) / 1e9


def pace(ends: list[float], part: tuple[float, float, float]) -> float:
    """Steps a second in a part of the run; of those that begin or end elsewhere, a part.

    Args:
        ends: when each step ended, seconds.
    """
    import numpy as np

    before, after = np.interp(part[:2], ends, np.arange(len(ends)))
    return float(after - before) / (part[1] - part[0])


def standard_error(values: list[float]) -> float:
    """Of their median, if they lie about it as in a normal distribution with their quartiles."""
    quarter, _, three = statistics.quantiles(values)
    return 1.253 * (three - quarter) / 1.349 / len(values) ** 0.5


def measure(options: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Train, and watch it by turns."""
    steps = round((2 * options.pairs * PART_S + 15) / options.step_s) + 200
    parts: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as name:
        logs = Path(name)
        training = threading.Thread(
            target=real_run, daemon=True,
            args=(options.ranks, "torch_dist/train_vit.py", logs, "--dataset", "synthetic",
                  "--model", "vit_digits", "--batch-size", 48, "--shares", "equal",
                  "--save-every", 10**9, "--eval-images", 2, "--max-steps", steps, *words),
        )  # fmt: skip
        training.start()
        records = logs / "run0" / "steps.rank0.jsonl"
        while len(lines_of(records)) < 100 and training.is_alive():
            time.sleep(0.5)
        with View(logs / "run0") as view:
            time.sleep(5.0)  # it has read what there was
            ranks, before = ranks_of(logs / "run0"), view.cpu_s()
            for pair in range(options.pairs):
                for watched in random.sample((True, False), 2):
                    parts[watched].append(view.part(watched, ranks))
                print(f"\rpair {pair + 1} of {options.pairs}", end="", flush=True)
            print()
            cpu_s = view.cpu_s() - before
        training.join()
        taken = lines_of(records)
    ends = [step["time"] for step in taken]
    watched, alone = ([pace(ends, part) for part in parts[each]] for each in (True, False))
    costs = [other / own - 1 for own, other in zip(watched, alone, strict=True)]
    pairs = zip(parts[True], parts[False], strict=True)
    waits = [own[2] - other[2] for own, other in pairs]
    return {
        "mode": "motley watched", "engine": "torch", "link": "loopback",
        "n": taken[-1]["n_global"], "ranks": options.ranks, "step_s": statistics.median(
            later - former for former, later in itertools.pairwise(ends)),
        "pairs": options.pairs, "seconds_of_a_part": PART_S,
        "steps_per_s": statistics.mean(watched), "steps_per_s_alone": statistics.mean(alone),
        "cost": statistics.median(costs), "mean_cost": statistics.mean(costs),
        "ranks_wait": statistics.median(waits), "mean_ranks_wait": statistics.mean(waits),
        "ranks_wait_standard_error": standard_error(waits),
        "ranks_wait_alone": statistics.median(part[2] for part in parts[False]),
        "standard_error": standard_error(costs), "spread": max(costs) - min(costs),
        "of_a_core": cpu_s / (options.pairs * PART_S),
    }  # fmt: skip


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="30 pairs")
    parser.add_argument("--pairs", type=int, default=300, help="two or more, default 300")
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument(
        "--step-s", type=float, default=0.022, metavar="S",
        help="no step is shorter, default 0.022: as many are taken as last until the end",
    )  # fmt: skip
    options, words = parser.parse_known_args()
    if options.quick:
        options.pairs = 30
    started, load = time.time(), os.getloadavg()
    row = measure(options, words)
    print(
        f"steps take {row['cost']:+.2%} longer while they are watched (standard error "
        f"{row['standard_error']:.2%}); all ranks together wait {row['ranks_wait']:+.2%} of the "
        f"time longer for a processor (standard error {row['ranks_wait_standard_error']:.2%}; "
        f"without it {row['ranks_wait_alone']:.2%}); the view takes {row['of_a_core']:.2%} of a "
        "core"
    )
    if options.json:
        result.write(options.json, [row], started, load_before=load, machine=machine())


if __name__ == "__main__":
    main()
