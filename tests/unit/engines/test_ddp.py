"""DDP where memory ends in the midst of a backward pass that communicates."""

import gc

import torch
from forked import run_fork
from one_rank import BATCH, engine_of
from torch.multiprocessing.reductions import StorageWeakRef

from motley.engines.ddp import DdpEngine


def break_off_a_step() -> None:
    """Say what is left of DDP's buckets, and what the step's second try finds."""
    engine, _, steps = engine_of(DdpEngine, "exact")
    _, micro_batches = next(iter(steps))
    batches = list(micro_batches)
    *_, last = engine.optimizer.param_groups[0]["params"]
    bucket = StorageWeakRef(last.grad.untyped_storage())

    def fail(_: torch.Tensor) -> None:
        raise MemoryError("out of memory")

    def passes(_: torch.Tensor) -> None:
        pass

    gc.disable()  # what only Python's collector would find is not let go of
    for fails in (True, False):
        for batch, is_last in batches:
            hook = last.register_post_accumulate_grad_hook(fail if fails and is_last else passes)
            engine.accumulate(batch, BATCH, is_last)
            hook.remove()
        result = engine.step()
        print(bucket.expired(), result.overflow, list(result.oom_ranks), result.retry)


def test_ddp_that_broke_off_is_let_go_of_before_there_is_another() -> None:
    done = run_fork(break_off_a_step)
    assert done.stdout.splitlines() == ["True True [0] True", "True False [] True"], done.stderr
