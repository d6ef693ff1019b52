"""A gradient that is sent behind the backward pass, and has no room to be sent from."""

import torch
from forked import run_fork
from one_rank import BATCH, engine_of

import motley.engines.gradient_sum
from motley.comm.reducer import Bucket, empty_bucket
from motley.engines.ddp import NoOverlapEngine
from motley.errors import NoMemoryError


def step_without_room() -> None:
    """Say what three steps find: one with room, one with none at first, one with none at all."""
    engine, model, steps = engine_of(NoOverlapEngine, "bf16")  # alone, but it is asked to round
    refusals = 0

    def room(place: int, parameters: list[torch.Tensor], final: bool, dtype: torch.dtype) -> Bucket:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise MemoryError("no room")
        return empty_bucket(place, parameters, final, dtype)

    motley.engines.gradient_sum.empty_bucket = room  # type: ignore[assignment]
    for (_, micro_batches), refused in zip(steps, (0, 1, 2), strict=False):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        refusals = refused
        try:
            for batch, last in micro_batches:
                engine.accumulate(batch, BATCH, last)
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
        "No memory is left for the buffer from which the gradient is sent"
    )
