"""Looks for a combination that is not exact: makes runs up, and holds each to one rank's.

    python tests/fuzz_exact.py --seconds 600            # other cases every day
    python tests/fuzz_exact.py --seconds 600 --seed 7   # the same cases again
    python tests/fuzz_exact.py --case '{"segments":[{"engine":"zero1","ranks":3,"shares":[5,0,1]}]}'

A case is a model (with batch norms, tied weights, experts, numbers of several types, an average of
its parameters, ...), a way to train it (engine, ranks, shares, precisions, optimizer, ...) and a
history (stops and resumes, on other ranks or through another engine; a kill between any two calls
of the loop, memory that ends, an overflow, a flipped bit, a torn file). Its losses, gradient norms,
learning rates, samples, evaluations and parameters are compared with those of a loop of a few lines
on one process that has no history, and an exported model with plain timm. What differs is made
smaller and printed as a line that repeats it. The exit status is 1 if anything was found.
"""

# ruff: noqa: E402
import argparse
import datetime
import os
import random
import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("tests/support", "src")]
# Without compiling: Kron takes a minute for that, whatever it computes.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

import torch
from fuzz.cases import Case
from fuzz.draw import draw, smaller
from fuzz.play import MODULES, judged, played
from fuzz.rules import broken_rules
from warm.ranks import WarmRanks

from motley.errors import MotleyError

# NCCL takes one rank a GPU.
MOST_RANKS = torch.cuda.device_count() or 6
TRIES = 30  # smaller cases that are tried of one that was found
OVERTIME_S = 30.0  # in which what was found last may still be made smaller
torch.set_num_threads(1)


@dataclass
class Found:
    """A kind of problem that was met.

    Attributes:
        case: the smallest that shows it. times: how often cases showed it.
    """

    case: Case
    problem: str
    times: int = 1

    def has(self, case: Case, problem: str) -> bool:
        """Return True if a case shows this kind: its model has the parts that do."""
        own, others = (set(each.recipe.parts) for each in (self.case, case))
        is_part = own == others or (own and own <= others)
        return bool(is_part) and signature(problem) == signature(self.problem)


@dataclass
class Search:
    """Cases of a seed, taken by lanes that each have ranks of their own.

    Attributes:
        tried: cases so far. failed: what has ended a lane before its time.
        found: kinds of problem.
    """

    seed: int
    deadline: float
    tried: int = 0
    failed: str = ""
    found: list[Found] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lane(self) -> None:
        """Try cases until time is up, or the fuzzer itself fails."""
        try:
            self._try_cases()
        except Exception as error:
            traceback.print_exc()
            self.failed = str(error)

    def _try_cases(self) -> None:
        with WarmRanks(MODULES) as ranks:
            while time.monotonic() < self.deadline:
                with self.lock:
                    number, self.tried = self.tried, self.tried + 1
                case = draw(random.Random(f"{self.seed}.{number}"), MOST_RANKS)
                try:
                    problems = judged(case, ranks)
                except Exception:
                    print(f"the fuzzer fails at: python tests/fuzz_exact.py --case '{case}'")
                    raise
                if problems:
                    self._keep(case, problems[0], ranks)

    def _keep(self, case: Case, problem: str, ranks: WarmRanks) -> None:
        with self.lock:
            for known in self.found:
                if known.has(case, problem):
                    known.times += 1
                    return
            found = Found(case, problem)
            self.found.append(found)
        case, problem = shrink(case, problem, ranks, self.deadline + OVERTIME_S)
        with self.lock:
            found.case, found.problem = case, problem
            print(f"found: {problem}\n  python tests/fuzz_exact.py --case '{case}'", flush=True)


def signature(problem: str) -> str:
    """What two problems have in common that have one cause: words, no numbers, of the last line."""
    lines = [line for line in problem.splitlines() if line.strip()]
    return re.sub(r"[-+.\d]+(e-?\d+)?|0x\w+|'[^']*'", "#", f"{lines[0]} {lines[-1]}")[:160]


def shrink(case: Case, problem: str, ranks: WarmRanks, deadline: float) -> tuple[Case, str]:
    """The smallest case, of those that are tried until then, that breaks the same rule."""
    left, rule, again = TRIES, problem.split(":")[0], True
    while again and left > 0:
        again = False
        for other in smaller(case):
            left -= 1
            if left < 0 or time.monotonic() > deadline:
                return case, problem
            problems = [p for p in judged(other, ranks) if p.split(":")[0] == rule]
            if problems:
                case, problem, again = other, problems[0], True
                break
    return case, problem


def search(seconds: float, seed: int, lanes: int) -> int:
    """Try cases for so long; returns the exit status."""
    here = Search(seed, time.monotonic() + seconds)
    threads = [threading.Thread(target=here.lane, daemon=True) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    for thread in threads:
        while thread.is_alive():
            thread.join(15)
            passed = time.monotonic() - started
            print(f"  {passed:.0f} s: {here.tried} cases, {len(here.found)} kinds of problem",
                  flush=True)  # fmt: skip
    for found in here.found:
        print(f"{found.times} x {found.problem.splitlines()[0]}\n"
              f"  python tests/fuzz_exact.py --case '{found.case}'")  # fmt: skip
    print(f"{here.tried} cases of seed {seed} in {time.monotonic() - started:.0f} s: "
          f"{len(here.found)} kinds of problem"
          + (f"; the fuzzer itself failed: {here.failed}" if here.failed else ""))  # fmt: skip
    return int(bool(here.found or here.failed))


def one(text: str) -> int:
    """Judge one case; returns the exit status."""
    case = Case.parse(text)
    with WarmRanks(MODULES) as ranks, played(case, ranks) as here:
        problems = broken_rules(here, ranks)
        last = here.jobs[-1]
    refused = last.said if any(last.ended.codes) else []
    well = f"it is refused, and well: {refused[0]}" if refused else "nothing is wrong with it"
    print("\n".join(problems) or well)
    return int(bool(problems))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0, such as 600")
    return value


def main() -> int:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=_seconds, default=600.0, help="default 600")
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help="default: the date, YYYYMMDD")
    parser.add_argument("--case", metavar="JSON", help="this one alone, as the fuzzer printed it")
    parser.add_argument(
        "--lanes", type=int, default=max(1, min(8, len(os.sched_getaffinity(0)))),
        help="cases at a time; default: one a core, 8 at most",
    )  # fmt: skip
    given = parser.parse_args()
    try:
        return one(given.case) if given.case else search(given.seconds, given.seed, given.lanes)
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
