"""An engine of a group of one rank, in a fork that a test makes: see forked."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from motley.comm.modes import parse_wire
from motley.data.loader import Loader
from motley.engines.protocol import EngineContext
from motley.plan.plan import make_plan
from motley.plan.precision import LossScale
from motley.tasks.builtin import get_task
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net
from motley.train.command_line import read_config, training_parser

BATCH = 8  # samples of a step, in two micro-batches


def engine_of(
    make: Callable[[TaskModel, EngineContext], Any], wire: str
) -> tuple[Any, TaskModel, Iterable[Any]]:
    """The default model in an engine, that model, and the steps of an epoch."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cpu, config = torch.device("cpu"), read_config(training_parser(""), ["--workers", "0"])
    task = get_task(config)
    model = TaskModel(task, build_net(task, config), "fp32", cpu)
    mode = parse_wire(wire)
    assert mode is not None
    plan = make_plan(BATCH, (1.0,), (BATCH // 2,), mode, 1)
    engine = make(model, EngineContext(config, 0, 1, cpu, ("fp32",), LossScale(1.0), plan))
    return engine, model, Loader(task, config, 0, cpu).steps(0, 0, plan)
