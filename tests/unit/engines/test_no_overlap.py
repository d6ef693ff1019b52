"""A gradient that is sent behind the backward pass, and has no room to be sent from."""

import torch
import torch.distributed as dist
from forked import run_fork

import motley.engines.no_overlap
from motley.comm.modes import parse_wire
from motley.comm.reducer import Bucket, empty_bucket
from motley.data.loader import Loader
from motley.engines.no_overlap import NoOverlapEngine
from motley.engines.protocol import EngineContext
from motley.errors import NoMemoryError
from motley.plan.plan import make_plan
from motley.plan.precision import LossScale
from motley.tasks.find import task_of
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net
from motley.train.command_line import read_config, training_parser

CPU = torch.device("cpu")


def step_without_room() -> None:
    """Say what three steps find: one with room, one with none at first, one with none at all."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = read_config(training_parser(""), ["--workers", "0"])
    task = task_of(config)
    model = TaskModel(task, build_net(task, config), "fp32", CPU)
    wire = parse_wire("bf16")  # alone, but it is asked to round
    assert wire is not None
    plan = make_plan(8, (1.0,), (4,), wire, 1)
    engine = NoOverlapEngine(
        model, EngineContext(config, 0, 1, CPU, ("fp32",), LossScale(1.0), plan)
    )
    steps = Loader(task, config, 0, CPU).steps(0, 0, plan)
    refusals = 0

    def room(place: int, parameters: list[torch.Tensor], final: bool, dtype: torch.dtype) -> Bucket:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise MemoryError("no room")
        return empty_bucket(place, parameters, final, dtype)

    motley.engines.no_overlap.empty_bucket = room  # type: ignore[assignment]
    for (_, micro_batches), refused in zip(steps, (0, 1, 2), strict=False):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        refusals = refused
        try:
            for batch, last in micro_batches:
                engine.accumulate(batch, 8, last)
            result = engine.step()
        except NoMemoryError as error:
            print(error)
            return
        same = all(map(torch.equal, before, model.parameters()))
        print(same, result.overflow, list(result.oom_ranks), result.retry)


def test_nobody_steps_where_there_is_no_room_at_first_and_none_at_all_is_said() -> None:
    done = run_fork(step_without_room)
    taken, again, ended = done.stdout.splitlines()
    assert taken == "False False [] True"
    assert again == "True True [0] True"
    assert ended.startswith("no room; ") and ended.endswith(
        "no room is left to send the gradient from"
    )
