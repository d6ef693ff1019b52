"""Trains, and changes what one rank holds just before all ranks compare: after some step, once.

    mpirun -np 3 --hostfile hosts.txt \\
        ./entry_cn.sh tests/support/drivers/flipped.py --flip 1:moment:4

RANK:WHAT:STEP, where WHAT is a ``parameter``, a ``moment`` of the optimizer, or its ``step``. With
``--unlike`` it does so from then on each time, and the ranks pass for unlike devices.
"""

import argparse

import torch

import motley.train.agreement
from motley.engines.ddp import DdpEngine, NoOverlapEngine
from motley.engines.local_sgd import LocalEngine
from motley.engines.protocol import Engine, EngineContext, LaunchedStep
from motley.launch.world import run
from motley.plan.wire import Addition, EngineTraits
from motley.tasks.model import TaskModel
from motley.train.command_line import read_config, training_parser
from motley.train.start import train


class Flipped:
    """Goes before an engine's class."""

    flip: tuple[int, str, int]
    again = False
    _taken = 0

    def launch_step(self, late: bool) -> LaunchedStep:
        """See motley.engines.protocol.Engine."""
        self._taken += 1
        return super().launch_step(late)  # type: ignore[misc, no-any-return]

    @torch.no_grad()
    def sync_parameters(self) -> None:
        """See motley.engines.protocol.Engine."""
        super().sync_parameters()  # type: ignore[misc]
        rank, what, step = self.flip
        due = self._taken == step or (self.again and self._taken > step)
        if not due or self._context.rank != rank:  # type: ignore[attr-defined]
            return
        if not self.again:
            self.flip = (-1, "", 0)
        parameter = list(self._model.parameters())[3]  # type: ignore[attr-defined]
        slots = self.optimizer.state[parameter]  # type: ignore[attr-defined]
        chosen = {"parameter": parameter, "moment": slots["exp_avg_sq"], "step": slots["step"]}
        chosen[what].view(-1)[0] += 1


class FlippedDdp(Flipped, DdpEngine):
    """See both."""


class FlippedNoOverlap(Flipped, NoOverlapEngine):
    """See both."""


class FlippedLocal(Flipped, LocalEngine):
    """See both."""


class Engines:
    """Implements motley.engines.protocol.EngineFactory."""

    traits = EngineTraits()

    def __call__(self, model: TaskModel, context: EngineContext) -> Engine:
        """As motley's own do."""
        if context.plan.wire.addition is Addition.LOCAL_STEPS:
            return FlippedLocal(model, context)
        return (FlippedNoOverlap if context.plan.buckets == 1 else FlippedDdp)(model, context)


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--flip", required=True)
    own.add_argument("--unlike", action="store_true")
    given, rest = own.parse_known_args()
    if given.unlike:
        Flipped.again, motley.train.agreement._unlike = True, lambda workers: True
    rank, what, step = given.flip.split(":")
    Flipped.flip = (int(rank), what, int(step))
    config = read_config(training_parser(str(__doc__)), rest)
    run(lambda world: train(world, config, Engines()))
