"""What a good user of today's tools would write: the peers of mixed_lab.py and wire.py.

Each is a step of one rank: ``plain-ddp`` and ``accelerate`` as their documentation has them, with
equal batches; ``ddp-fp16`` and ``ddp-powersgd`` with torch's own hooks for a slow wire;
``deepspeed-STAGE``, and ``deepspeed-STAGE-fp16`` with 16 bits on the wire and overlap_comm. With
``ddp-by-hand``, and ``-fp16`` or ``-powersgd`` after it, the user knows each host's speed exactly,
gives it so many samples, and weighs the mean of its losses, so that the gradient is that of N.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from mixed import Bench
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from motley.data.source import Batch
from motley.plan.plan import apportion
from motley.tasks.model import TaskModel

Step = Callable[[], None]
RANK = 4  # of torch's PowerSGD, as of --wire powersgd:4
NAMES = (
    "plain-ddp", "accelerate", "deepspeed-0", "deepspeed-1", "deepspeed-0-fp16",
    "deepspeed-1-fp16", "ddp-fp16", "ddp-powersgd", "ddp-by-hand", "ddp-by-hand-fp16",
    "ddp-by-hand-powersgd",
)  # fmt: skip


def parse_step(name: str, bench: Bench, n: int, speeds: list[float]) -> Step:
    """A peer's step on this rank.

    Args:
        name: one of NAMES. n: the global batch. speeds: of the hosts, as a user may know them.
    """
    by_hand = "by-hand" in name
    shares = speeds if by_hand else [1.0] * bench.group.size
    counts = apportion(n, shares)
    model = bench.model()
    batch = bench.batch(model, counts[bench.rank])
    if name == "accelerate":
        return _accelerate(bench, model, batch)
    if name.startswith("deepspeed"):
        _, stage, *wire = name.split("-")
        return _deepspeed(bench, model, batch, int(stage), bool(wire))
    # DDP takes the mean over ranks of the means over their samples.
    weight = counts[bench.rank] * bench.group.size / n if by_hand else 1.0
    return bench.plain_ddp_step(model, batch, weight, **_HOOKS.get(name.rpartition("-")[2], {}))


def _fp16(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)


def _powersgd(ddp: DistributedDataParallel) -> None:
    state = powersgd.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=RANK, start_powerSGD_iter=2
    )
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)


# Torch's PowerSGD sends again from the callback of what it has sent; over gloo, of several buckets,
# the ranks do not do that in one order, and the process is aborted. So all is one bucket.
_HOOKS: dict[str, dict[str, Any]] = {
    "fp16": {"set_up": _fp16},
    "powersgd": {"set_up": _powersgd, "bucket_cap_mb": 1 << 10},
}


def _accelerate(bench: Bench, model: TaskModel, batch: Batch) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=bench.group.device.type == "cpu")
    net, optimizer = accelerator.prepare(model, bench.optimizer(model))

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(net(batch.data).mean())
        optimizer.step()

    return step


def _deepspeed(bench: Bench, model: TaskModel, batch: Batch, stage: int, fast: bool) -> Step:
    import deepspeed

    zero: dict[str, Any] = {"stage": stage}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": len(batch), "gradient_accumulation_steps": 1,
        "zero_optimization": zero, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    if fast:
        settings["communication_data_type"] = "fp16"
        zero["overlap_comm"] = True
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=bench.optimizer(model), config=settings
    )

    def step() -> None:
        engine.backward(engine(batch.data).mean())
        engine.step()

    return step
