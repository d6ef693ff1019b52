"""Local steps do what src/motley/engines/local_sgd.py says: here against all ranks in one process.

    mpirun -np 3 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/local_steps.py

Unequal shares, one of them nothing; steps that one rank skips; and more steps than fill the last
period. SGD with momentum, whose memory differs between ranks until they unite.
"""

import math

import torch
from torch import Tensor, nn

from motley.comm.modes.local_sgd import LocalSgd
from motley.data.source import Batch
from motley.engines.local_sgd import LocalEngine
from motley.engines.optimizer import make_optimizer
from motley.engines.protocol import EngineContext
from motley.engines.step import gradient_norm, unscale_and_clip
from motley.launch.world import World, run
from motley.measure.process_group import join_process_group, leave_process_group
from motley.plan.plan import make_plan
from motley.plan.precision import LossScale, read_precisions
from motley.tasks.builtin import get_task
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net
from motley.train.agreement import digests
from motley.train.command_line import read_config, training_parser

STEPS, EVERY, N = 11, 4, 24
SHARES = (5, 3, 0)
BROKEN = {(3, 1), (6, 0)}  # step and rank whose gradient is not finite


def batch_of(step: int, rank: int, samples: int, device: torch.device) -> Batch:
    """The same on every process."""
    noise = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(samples, 1, 8, 8, generator=noise)
    labels = torch.randint(0, 10, (samples,), generator=noise)
    return Batch({"images": images.to(device), "labels": labels.to(device)}, tuple(range(samples)))


def vector(net: nn.Module) -> Tensor:
    """All parameters."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@torch.no_grad()
def assign(net: nn.Module, values: Tensor) -> None:
    """The other way."""
    for parameter in net.parameters():
        part, values = values[: parameter.numel()], values[parameter.numel() :]
        parameter.copy_(part.view_as(parameter))


def main(world: World) -> None:
    """Train both ways, compare."""
    options = ["--model", "vit_digits", "--opt", "sgd", "--lr", "0.05", "--clip-grad", "1.0"]
    config = read_config(training_parser(""), options)
    group = join_process_group(world, read_precisions("fp32"))
    assert group.rank is not None
    task = get_task(config)
    models = [
        TaskModel(task, build_net(task, config), "fp32", group.device)
        for _ in range(group.size + 1)
    ]
    plan = make_plan(N, SHARES[: group.size], (N,) * group.size, LocalSgd(EVERY))
    scale = LossScale(1024.0)
    context = EngineContext(
        config, group.rank, group.size, group.device, group.precisions, scale, plan
    )
    engine = LocalEngine(models.pop(), context)
    for step in range(STEPS):
        own = batch_of(step, group.rank, plan.counts[group.rank], group.device)
        engine.accumulate(own, N, True)
        if (step, group.rank) in BROKEN:
            gradient = next(engine._model.parameters()).grad
            assert gradient is not None
            gradient.fill_(math.inf)
        result = engine.step()
        assert result.overflow == ((step, group.rank) in BROKEN)
        assert (result.loss_sum is None) == (step + 1 != 2 * EVERY)
    engine.sync_parameters()
    assert len(set(digests(engine))) == 1

    optimizers = [make_optimizer(model.net, config) for model in models]
    agreed = vector(models[0].net)
    starts, sums, used = [agreed] * group.size, torch.zeros_like(agreed), [0] * group.size
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = batch_of(step, rank, plan.counts[rank], group.device)
            if not len(mine) or (step, rank) in BROKEN:
                continue
            model(mine.data).mean().backward()
            parameters = list(model.parameters())
            unscale_and_clip(parameters, gradient_norm(parameters), 1.0, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            used[rank] += len(mine)
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            agreed = agreed + sums
            moved = [vector(m.net) - start for m, start in zip(models, starts, strict=True)]
            sums = sum(u / sum(used) * d for u, d in zip(used, moved, strict=True))
            starts, used = [agreed + d for d in moved], [0] * group.size
            for model, start in zip(models, starts, strict=True):
                assign(model.net, start)
    found, expected = vector(engine._model.net), agreed + sums
    worst = float(
        (found - expected).abs().max() / (expected - vector(build_net(task, config))).abs().max()
    )
    print(f"rank {group.rank}: worst {worst:.3e}", flush=True)
    moments = [
        sum(n / N * o.state[p]["momentum_buffer"]
            for n, o, p in zip(plan.counts, optimizers, ps, strict=True) if n)
        for ps in zip(*(m.net.parameters() for m in models), strict=True)
    ]  # fmt: skip
    for parameter, moment in zip(engine._model.net.parameters(), moments, strict=True):
        torch.testing.assert_close(
            engine.optimizer.state[parameter]["momentum_buffer"], moment, rtol=1e-4, atol=1e-6
        )
    leave_process_group()


if __name__ == "__main__":
    run(main)
