"""Training that fails in the middle of a step, on the last rank or ``--on`` others, as ``1,2``.

    mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/failing.py --fail memory

Out of memory whatever the micro-batch, killed, killed inside the optimizer while the others are
in the midst of its step, at a wrong address, for ever at rest, the same with
the GIL held, gone without a word, or by sys.exit; by a parameter that becomes Inf, or a gradient
that is Inf once. ``--step``: in which; default 3.
"""

import argparse
import ctypes
import math
import os
import signal
import sys
import time

import torch
from late import LateEngine

from motley.data.source import Batch
from motley.engines.ddp import DdpEngine, NoOverlapEngine
from motley.engines.local_sgd import LocalEngine
from motley.engines.protocol import EngineContext
from motley.engines.step import StepEngine
from motley.engines.strategies import Engines
from motley.launch.world import run
from motley.membership.survivors import SURVIVE
from motley.plan.wire import Addition, EngineTraits
from motley.tasks.model import TaskModel
from motley.train.command_line import read_config, training_parser
from motley.train.start import train

FAILURES = {
    "memory": lambda: torch.empty(2**50),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "address": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(3600),
    "gil": lambda: ctypes.PyDLL(None).sleep(3600),
    "gone": lambda: os._exit(0),
    "exit": lambda: sys.exit(0),
}
_SPOILT = ("parameter", "gradient", "stepping")
HALF_STEP_S = 1.5  # in which the others notice that the rank is gone


class Failing(StepEngine):
    """Fails in a step, and again if that is taken again; not with fewer ranks than at first."""

    failure: str
    step_of_it: int
    on: tuple[int, ...]  # empty: the last rank
    pace_s: float
    ranks: int | None = None
    late = False  # as ranks with GPUs
    spoilt = False  # a gradient; once
    _taken = 0
    _steps_slowly = False

    def _accumulate(self, batch: Batch, last: bool) -> torch.Tensor:
        ranks = self._context.size
        Failing.ranks = Failing.ranks or ranks
        self._here = self._context.rank in (self.on or (ranks - 1,))
        if ranks == Failing.ranks and self._taken >= self.step_of_it:
            if self.failure == "stepping":
                if not self._steps_slowly:
                    self._step_slowly()
            elif self._here:
                self._fail()
        if ranks < Failing.ranks:
            time.sleep(self.pace_s)
        self._taken += last
        return super()._accumulate(batch, last)

    def _step_slowly(self) -> None:
        """Change one half of the parameters, and the rest when the others know of a lost rank."""
        self._steps_slowly = True
        plain = self.optimizer.step

        @torch.no_grad()
        def step() -> None:
            self.optimizer.step = plain
            if self._here:
                FAILURES["killed"]()
            late = self._parameters[len(self._parameters) // 2 :]
            before = [parameter.clone() for parameter in late]
            plain()
            after = [parameter.clone() for parameter in late]
            torch._foreach_copy_(late, before)
            time.sleep(HALF_STEP_S)
            torch._foreach_copy_(late, after)

        self.optimizer.step = step

    def _fail(self) -> None:
        parameter = self._parameters[0]
        if self.failure in FAILURES:
            FAILURES[self.failure]()
        elif self.failure == "parameter":
            parameter.detach().view(-1)[0] = math.inf
        elif not Failing.spoilt:
            Failing.spoilt = True
            hook = parameter.register_hook(lambda gradient: (hook.remove(), gradient + math.inf)[1])


class FailingDdp(Failing, DdpEngine):
    """Sends what each step finds."""


class FailingNoOverlap(Failing, NoOverlapEngine):
    """Sends it behind the backward pass."""


class FailingLate(Failing, LateEngine):
    """Reads each step's outcome after the next one's backward pass."""


class FailingLocal(Failing, LocalEngine):
    """Takes steps alone."""


def failing_engine(model: TaskModel, context: EngineContext) -> Failing:
    """As ``--wire`` says."""
    if context.plan.wire.addition is Addition.LOCAL_STEPS:
        return FailingLocal(model, context)
    if Failing.late:
        return FailingLate(model, context)
    return (FailingNoOverlap if context.plan.buckets == 1 else FailingDdp)(model, context)


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--fail", choices=[*FAILURES, *_SPOILT], required=True)
    own.add_argument("--step", type=int, default=3)
    own.add_argument("--on", type=lambda text: tuple(map(int, text.split(","))), default=())
    own.add_argument("--pace", type=float, default=0, help="seconds of a step without the rank")
    own.add_argument("--survive", action="store_true", help="the others may go on")
    own.add_argument("--late", action="store_true", help="read outcomes as ranks with GPUs do")
    given, rest = own.parse_known_args()
    Failing.late = given.late
    if given.survive:
        os.environ |= SURVIVE
    Failing.failure, Failing.step_of_it, Failing.on = given.fail, given.step, given.on
    Failing.pace_s = given.pace
    config = read_config(training_parser(""), rest)
    run(lambda world: train(world, config, Engines(EngineTraits(), failing_engine)))


if __name__ == "__main__":
    main()
