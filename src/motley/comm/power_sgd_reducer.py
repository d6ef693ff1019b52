"""The reducer of ``--wire powersgd``, around torch's hook.

Unlike torch's hook alone, the reducer supports unequal shares, skipped steps and a changing loss
scale.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", 2019.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.futures import Future

from motley.comm.collectives import leave_group
from motley.comm.modes.power_sgd import PowerSgd
from motley.comm.reducer import DTYPES, Bucket, Reducer, Sums, in_thread

_LANES = 2  # a third was no faster
_EXACT_AT_FIRST = 2  # steps; torch's PowerSGD needs two, to fix its own buckets


class _Listening:
    """A replacement for the process group of torch's hook that stores the tensors that are sent.

    Attributes:
        sent: copies of this rank's tensors before the sum, by the address of the tensor that is
            summed in place.
    """

    def __init__(self, sums: Sums, group: Any, dtype: torch.dtype) -> None:
        self._sums, self._group, self._dtype = sums, group, dtype
        self.sent: dict[int, Tensor] = {}

    def size(self) -> int:
        """Return the number of ranks."""
        return dist.get_world_size(self._group)

    def allreduce(self, tensors: list[Tensor], _: object) -> "_Work":
        """Start to add up one tensor over all ranks, in place."""
        (whole,) = tensors
        if len(whole):  # an empty tensor has no address of its own
            self.sent[whole.data_ptr()] = whole.to(self._dtype, copy=True)
        summed = self._sums.begin(whole, self._dtype, self._group)
        return _Work(summed.then(lambda future: [future.value()]))


@dataclass(frozen=True)
class _Work:
    """An all-reduce that has started. The value of ``future`` is a list of one tensor."""

    future: Future[list[Tensor]]

    def get_future(self) -> Future[list[Tensor]]:
        """Return the future of the summed tensor."""
        return self.future


class _Lane:
    """A queue of buckets that are sent one after another, through process groups of this queue.

    torch's hook would send gradients that are not compressed, such as biases, before the first
    matrix. Over gloo, a second process group sends these gradients in parallel with the matrices,
    because a gloo group has two threads, and the hook lets one thread wait for the other. On links
    with a high latency, the second group saves a third of the time. Gloo's threads would start the
    second matrices in a different order on each rank, so a thread of this queue waits for each
    bucket.

    Attributes:
        power: state of torch's hook for these buckets.
        group: process group of the matrices; None: the default group.
        beside: process group of gradients that are not compressed.
        dtype: dtype in which elements are sent.
        thread: thread that waits for each bucket; None on a GPU, whose streams keep the order.
    """

    def __init__(self, number: int, mode: PowerSgd, device: torch.device, sums: Sums) -> None:
        self._device, threaded = device, device.type != "cuda"
        self.thread = ThreadPoolExecutor(1, "powersgd") if threaded else None
        self.beside: Any = dist.new_group() if threaded else None
        self.group: Any = dist.new_group() if number else None
        self.dtype = DTYPES[mode.dtype]
        self._heard = _Listening(sums, self.group, self.dtype)
        self.power = PowerSGDState(
            process_group=self._heard,
            matrix_approximation_rank=mode.rank,
            start_powerSGD_iter=_EXACT_AT_FIRST, orthogonalization_epsilon=1e-8,
            compression_stats_logging_frequency=2**62,
        )  # fmt: skip
        self.keep()

    def keep(self) -> None:
        """Save a copy of the hook's state, for :meth:`put_back`."""
        # The hook replaces the error by a new tensor, but changes Q in place.
        self._kept = (dict(self.power.error_dict), _copies(self.power.q_memory_dict))

    def put_back(self) -> None:
        """Restore the state that :meth:`keep` has saved, after a skipped step."""
        power = self.power
        power.error_dict, power.q_memory_dict = self._kept
        for place in set(power.p_memory_dict) - set(power.q_memory_dict):
            del power.p_memory_dict[place]

    def rescale(self, factor: float) -> None:
        """Multiply the stored errors by ``factor``, because errors are scaled like the loss."""
        if factor != 1.0:
            for error in self.power.error_dict.values():
                error.mul_(factor)

    def begin(self, bucket: Bucket) -> None:
        """Create the initial matrix Q of a bucket at its first use. Q is equal on all ranks.

        The hook would draw Q from torch's global generator, which other threads may be using.
        """
        power, place = self.power, bucket.place
        if place in power.p_memory_dict:
            return
        matrices = _matrices(bucket, power.matrix_approximation_rank)
        numbers = sum(wide * rank for _, _, wide, rank in matrices)
        noise = torch.randn(numbers, generator=torch.Generator().manual_seed(place))
        power.q_memory_dict[place] = noise.to(self._device)
        numbers = sum(high * rank for _, high, _, rank in matrices)
        power.p_memory_dict[place] = torch.empty(numbers, device=self._device)

    def own_error(self, bucket: Bucket) -> None:
        """Replace the hook's error by the error of this rank's own matrices.

        The hook computes the error as this rank's part of the gradient minus the mean of all ranks,
        P Q^T. The sum of these errors over ranks is correct. But each error grows in every step in
        which the ranks' parts differ, until rounding makes the sum inaccurate. All ranks have the
        same orthogonal P, and Q is the mean of the ranks' own matrices q. This rank's own error,
        part - P q^T, is therefore (part - P Q^T) + P (Q - q)^T.
        """
        if not bucket.grads:
            return
        power, place = self.power, bucket.place
        p, q, error = (
            each[place] for each in (power.p_memory_dict, power.q_memory_dict, power.error_dict)
        )
        self._heard.sent.pop(p.data_ptr())
        own = self._heard.sent.pop(q.data_ptr())
        others = q - own
        _used_here(own)
        for start, high, wide, rank in _matrices(bucket, power.matrix_approximation_rank):
            thin_p, p = p[: high * rank].view(high, rank), p[high * rank :]
            thin_q, others = others[: wide * rank].view(wide, rank), others[wide * rank :]
            error[start : start + high * wide].view(high, wide).addmm_(thin_p, thin_q.T)

    def close(self) -> None:
        """Stop the queue's thread and leave its process groups."""
        if self.thread is not None:
            self.thread.shutdown()
        for group in (self.beside, self.group):
            if group is not None:
                leave_group(group)


class PowerSgdReducer(Reducer):
    """A reducer that sends two thin matrices in place of each gradient matrix.

    The error of the matrices is added to the next step's gradient.

    torch's hook computes the mean over W ranks. Each rank therefore multiplies its gradient by W,
    so that the mean is the sum, for any shares. The error is the difference of a rank's gradient
    and the product of the matrices that the rank has sent. The error has the factor W and the loss
    scale, too.

    A bucket's second matrix cannot be sent before the sum of the first matrix has arrived. On a CPU
    buckets alternate between two queues (:class:`_Lane`), so that a link is not idle during this
    wait.
    """

    def __init__(self, mode: PowerSgd, device: torch.device) -> None:
        super().__init__()
        self._ranks, self._device, self._mode = dist.get_world_size(), device, mode
        lanes = 1 if device.type == "cuda" else _LANES
        self._lanes = [_Lane(number, mode, device, self._sums) for number in range(lanes)]

    def begin_at_once(self) -> None:
        """Skip the exact steps with which PowerSGD begins. Measurements call this method."""
        for lane in self._lanes:
            lane.power.iter = _EXACT_AT_FIRST

    def send(self, bucket: Bucket) -> Future[Tensor]:
        """Start to sum a bucket over all ranks, and return a future of ``bucket.flat``."""
        lane = self._lanes[bucket.place % len(self._lanes)]
        if lane.thread is None:
            return self._sum(bucket, lane)
        return in_thread(lane.thread, lambda: self._sum(bucket, lane).wait())

    def _sum(self, bucket: Bucket, lane: _Lane) -> Future[Tensor]:
        if lane.power.iter < _EXACT_AT_FIRST:
            return self._sums.begin(bucket.flat, lane.dtype, lane.group)
        thin = [grad for grad in bucket.grads if self._mode.thin(grad.shape)]
        rest = [grad for grad in bucket.grads if not self._mode.thin(grad.shape)]
        # One more number, because the tensor would be empty if all gradients are compressed.
        whole = torch.cat([bucket.flat.new_zeros(1), *(grad.flatten() for grad in rest)])
        beside = self._sums.begin(whole, lane.dtype, lane.beside)
        bucket.flat.mul_(self._ranks)
        matrices = replace(bucket, grads=thin, final=False)
        lane.begin(matrices)
        future = powerSGD_hook(lane.power, matrices)

        def put_back(summed: Future[Tensor]) -> Tensor:
            lane.own_error(matrices)
            parts = torch.split(beside.wait()[1:], [grad.numel() for grad in rest])
            for grad, part in zip(rest, parts, strict=True):
                grad.copy_(part.view_as(grad))
            return summed.value()

        return future.then(put_back)

    def after_step(self, taken: bool, factor: float) -> None:
        """Update the state that is kept between steps. All ranks call it."""
        super().after_step(taken, factor)
        for lane in self._lanes:
            if taken:
                lane.power.iter += 1  # the hook cannot count steps itself, with two lanes
            else:
                lane.put_back()
            lane.rescale(factor)
            lane.keep()

    def close(self) -> None:
        """Free process groups and threads. All ranks call it."""
        super().close()
        for lane in self._lanes:
            lane.close()

    def state(self) -> dict[str, Tensor]:
        """Return the state that only this rank holds between steps, on the CPU."""
        state = {"iter": torch.tensor(self._lanes[0].power.iter)}
        for power in (lane.power for lane in self._lanes):
            for place in power.p_memory_dict:
                for kind, memory in _memories(power).items():
                    state[f"{kind}.{place}"] = memory[place].cpu()
        return state

    def load_state(self, state: Mapping[str, Tensor], factor: float = 1.0) -> None:
        """Continue from a saved state.

        If the state is empty, the first steps are exact, as at the start of training.
        """
        for power in (lane.power for lane in self._lanes):
            power.iter = int(state.get("iter", 0))
            for memory in _memories(power).values():
                memory.clear()
        for key, value in state.items():
            kind, dot, place = key.partition(".")
            if dot:
                power = self._lanes[int(place) % len(self._lanes)].power
                _memories(power)[kind][int(place)] = value.to(self._device)
        for lane in self._lanes:
            lane.rescale(factor)
            lane.keep()


def _memories(power: Any) -> dict[str, dict[int, Tensor]]:
    """Return the state that torch's hook keeps between steps.

    The dictionary has an entry for each kind of state: the tensors of this kind by bucket.
    """
    return {"error": power.error_dict, "p": power.p_memory_dict, "q": power.q_memory_dict}


def _used_here(tensor: Tensor) -> None:
    """Keep a tensor's memory until the current stream has used the tensor.

    The memory was allocated on another stream.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _matrices(bucket: Bucket, most: int) -> list[tuple[int, int, int, int]]:
    """Return four numbers per matrix of a bucket: start, height, width and rank.

    The rank is at most ``most``. The order is that of the hook's state, in which matrices of one
    shape are adjacent.
    """
    start, result = bucket.flat.storage_offset(), []
    for grad in bucket.grads:
        high, wide = len(grad), grad.numel() // len(grad)
        result.append((int(grad.storage_offset() - start), high, wide, min(high, wide, most)))
    shapes = [sides for _, *sides in result]
    return sorted(result, key=lambda each: shapes.index([*each[1:]]))


def _copies(memory: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {place: tensor.clone() for place, tensor in memory.items()}
