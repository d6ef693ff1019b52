"""A step that nobody takes, and a loss scale that changes, leave PowerSGD's error memory right.

The same gradients twice: as they are; and with one that is not finite between them, and twice
the loss scale from the third on. Doubling rounds nothing, so the sums agree to the bit.
And a rank's error stays in bounds where its part is always larger than the others'.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from motley.comm.modes import parse_wire
from motley.comm.reducer import Reducer, make_buckets
from motley.launch.world import World, run
from motley.measure.process_group import join_process_group, leave_process_group
from motley.plan.precision import read_precisions

SHAPES = ((96, 64), (96,), (64, 96), (128, 64), (7,))
STEPS, LONG = 8, 100


def send(reducer: Reducer, seed: int, scale: float, device: torch.device) -> tuple[Tensor, float]:
    """The sum of one step's gradients, the loss scale undone; and the error of a bias in it."""
    torch.manual_seed(seed)
    buckets = make_buckets([torch.empty(shape, device=device) for shape in SHAPES], 10_000)
    for bucket in buckets:
        bucket.flat.mul_(scale)
    bias = buckets[0].grads[1].clone()  # beside a matrix, and not compressed
    dist.all_reduce(bias)
    for future in [reducer.send(bucket) for bucket in buckets]:
        future.wait()
    error = float((buckets[0].grads[1] - bias).abs().max()) / scale
    return torch.cat([bucket.flat for bucket in buckets]) / scale, error


def own_errors(wire: str, rank: int, device: torch.device) -> list[float]:
    """How large a rank's error is after some steps and twice as many, where one rank's part is
    always far larger than the sum, and the others' take it away again."""
    mode, norms = parse_wire(wire), list[float]()
    assert mode is not None
    reducer = mode.reducer(device)
    part = -9.0 if rank else 10.0 * dist.get_world_size() - 9.0
    for step in range(2 * LONG):
        send(reducer, 5, part, device)
        reducer.after_step(True, 1.0)
        if (step + 1) % LONG == 0:
            kept = [value for key, value in reducer.state().items() if key.startswith("error")]
            norms.append(float(torch.cat(kept).norm()))
    reducer.close()
    return norms


def compare(wire: str, rank: int, device: torch.device) -> float:
    """Run both, compare; returns the worst error of a bias."""
    mode, worst = parse_wire(wire), 0.0
    assert mode is not None
    plain, tried = mode.reducer(device), mode.reducer(device)
    for step in range(STEPS):
        seed, scale = 10 * step + rank, 1.0 if step < 2 else 2.0
        expected, error = send(plain, seed, 1.0, device)
        worst = max(worst, error)
        plain.after_step(True, 1.0)
        if step in (0, 2, 3, 4):
            send(tried, seed, math.inf, device)
            tried.after_step(False, 1.0)
        if step in (1, 5):  # as after a resume, or where a run goes back, before it compresses
            again = mode.reducer(device)
            for later in range(4):
                send(again, later, 1.0, device)
                again.after_step(True, 1.0)
            again.load_state(tried.state())
            tried.close()
            tried = again
        found, _ = send(tried, seed, scale, device)
        tried.after_step(True, 2.0 if step == 1 else 1.0)
        assert torch.equal(found, expected), (step, found - expected)
    plain.close()
    tried.close()
    return worst


def main(world: World) -> None:
    """What travels in fp32; and in bf16, of numbers up to about 6."""
    device = join_process_group(world, read_precisions("fp32")).device
    assert compare("powersgd:2", world.rank, device) < 1e-5
    assert 1e-5 < compare("powersgd:2+bf16", world.rank, device) < 0.05
    for wire in ("powersgd:2", "powersgd:2+bf16"):
        half, whole = own_errors(wire, world.rank, device)
        assert whole < 1.2 * half, (half, whole)
    leave_process_group()


if __name__ == "__main__":
    run(main)
