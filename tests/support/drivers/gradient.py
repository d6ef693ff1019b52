r"""On every rank: unequal splits give the gradient of one process.

    mpirun -np 3 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/gradient.py ddp
    mpirun -np 3 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/gradient.py zero
    mpirun -np 3 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/gradient.py ddp \
      --model test_resnet --img-size 32 --bn-group 4

Prints the largest relative difference over random shares and micro-batches: in fp64
through DDP, in fp32 through DeepSpeed, which refuses to reduce fp64 gradients. With ``types`` for
``ddp`` parameters keep their types, and a difference is in units of its rounding.
"""

import gc
import random
import sys

import torch

from motley.comm.modes.numbers import EXACT
from motley.data.loader import Loader
from motley.engines.protocol import Engine, EngineContext
from motley.engines.strategies import ddp
from motley.launch.world import World, run
from motley.measure.process_group import join_process_group, leave_process_group
from motley.plan.plan import make_plan
from motley.plan.precision import LossScale, read_precisions
from motley.tasks.builtin import get_task
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net
from motley.train.command_line import read_config, training_parser

ENGINE, *OPTIONS = sys.argv[1:]


def engine_of(model: TaskModel, context: EngineContext) -> Engine:
    if ENGINE == "zero":
        from motley.engines.zero_engine import ZeroEngine

        return ZeroEngine(model, context)
    return ddp.STRATEGIES[0].engine(model, context)


def gradient(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter's; of all together where they are of one type."""
    grads = [parameter.grad.clone() for parameter in parameters]
    return grads if ENGINE == "types" else [torch.cat([grad.flatten() for grad in grads])]


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    found = float((ours - theirs).norm() / theirs.norm())
    rounding = max(torch.finfo(each).eps for each in (ours.dtype, torch.float32))
    return found / rounding if ENGINE == "types" else found


def main(world: World) -> None:
    config = read_config(training_parser(""), OPTIONS)
    group = join_process_group(world, read_precisions("fp32"))
    device = torch.device("cpu")
    task = get_task(config)
    net = build_net(task, config)
    net = net.double() if ENGINE == "ddp" else net
    model = TaskModel(task, net, "fp32", device)
    parameters = list(model.parameters())
    choose = random.Random(0)  # the same on all ranks
    worst, engine = 0.0, None
    for trial in range(12):
        if trial % 3 == 0 and (engine is None or ENGINE != "zero"):
            buckets = (None, 1, 2, 8)[trial // 3]
            plan = make_plan(16, (1.0,) * group.size, (16,) * group.size, EXACT, buckets)
            scale = LossScale(1.0)
            context = EngineContext(
                config, group.rank, group.size, device, group.precisions, scale, plan
            )
            engine = None  # DDP takes its hooks off the parameters
            for parameter in parameters:
                parameter.grad = None
            gc.collect()
            engine = engine_of(model, context)
        n = choose.randint(group.size, 40)
        shares = [choose.choice([0, 1, 2, 5, 9]) for _ in range(group.size)]
        shares[choose.randrange(group.size)] = 3
        grain = task.grain
        n = max(n, grain * group.size)
        sizes = [choose.randint(grain, 20) for _ in range(group.size)]
        plan = make_plan(n, shares, sizes, EXACT, buckets, grain)
        engine.reconfigure(plan)
        engine.scale.value = 2.0 ** choose.randint(0, 20)

        engine.optimizer.zero_grad(set_to_none=False)
        loader = Loader(task, config, group.rank, device)
        _, micro_batches = next(iter(loader.steps(trial, 0, plan)))
        for batch, last in micro_batches:
            engine.accumulate(batch, n, last)
        ours = [grad / engine.scale.value for grad in gradient(parameters)]

        engine.optimizer.zero_grad(set_to_none=False)
        alone = Loader(task, config, 0, device)
        _, micro_batches = next(
            iter(alone.steps(trial, 0, make_plan(n, [1.0], [n], EXACT, grain=grain)))
        )
        for batch, _ in micro_batches:  # two, if the last group is a short one
            (model(batch.data).sum() / n).backward()
        theirs = gradient(parameters)
        worst = max(worst, *map(difference, ours, theirs))
    print(f"rank {group.rank}: worst {worst:.3e}", flush=True)
    leave_process_group()


if __name__ == "__main__":
    run(main)
