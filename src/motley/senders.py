"""How a rank adds its gradient to the others', one class for each ``--wire``.

A sender is given buckets in the same order on every rank, and gives back their sums over all
ranks: exact, rounded to 16 bits on the way, or by PowerSGD (torch's own).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Semaphore
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.futures import Future

from motley.wire import WireMode

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Numbers that a leaf sends at once: a bucket's 128th, for what the first and the last piece take is
# not hidden by others; but each costs the other ranks an all-reduce.
_PIECE, _PIECES = 4 * 1024, 128
# Pieces whose sums a leaf has not heard: one goes up, one is summed, one comes down, and one is at
# hand. With all at once TCP overran the queue before the slow link, and sent a third of it again.
_FLYING = 4
_LANES = 2  # a third was no faster
_EXACT_AT_FIRST = 2  # steps; torch's PowerSGD wants so many, to fix its own buckets


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel at once; has what torch's hooks ask of a dist.GradBucket.

    Attributes:
        place: of its steps' buckets, 0-based. flat: all its gradients, fp32 [numbers].
        grads: views of ``flat``, in the parameters' shapes. final: the step's last.
    """

    place: int
    flat: Tensor
    grads: Sequence[Tensor]
    final: bool

    def index(self) -> int:
        """See ``place``."""
        return self.place

    def buffer(self) -> Tensor:
        """See ``flat``."""
        return self.flat

    def gradients(self) -> Sequence[Tensor]:
        """See ``grads``."""
        return self.grads

    def is_last(self) -> bool:
        """See ``final``."""
        return self.final


class Sender:
    """The exact one: fp32. What the others do besides is for what they keep between steps."""

    def send(self, bucket: Bucket) -> Future[Tensor]:
        """Begin to sum a bucket over all ranks, in place."""
        work = dist.all_reduce(bucket.flat, async_op=True)
        return work.get_future().then(_first)

    def begin_at_once(self) -> None:
        """Without steps that are exact at first, as torch's PowerSGD takes them."""

    def settle(self, taken: bool, factor: float) -> None:
        """Hear how the step went; all ranks hear the same.

        Args:
            taken: else the parameters are as before, and so must be what the sender keeps.
            factor: of the coming step's loss scale to this one's.
        """

    def close(self) -> None:
        """Let go of groups and threads; all ranks call it."""

    def state(self) -> dict[str, Tensor]:
        """What this rank alone keeps between steps, on the CPU."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state`."""


class RoundingSender(Sender):
    """Sends 16-bit numbers. The gradient is divided by N and scaled already, so that nothing
    is divided after it is rounded; a sum that overflows is seen in the norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def send(self, bucket: Bucket) -> Future[Tensor]:
        """See Sender."""
        work = dist.all_reduce(bucket.flat.to(self._dtype), async_op=True)
        return work.get_future().then(lambda future: bucket.flat.copy_(_first(future)))


class LeafSender(Sender):
    """Spares one slow link: its rank, the leaf, sends its bucket once and receives the sum once.

    In a ring of n ranks each link carries 2 (n - 1) / n of the bucket each way; here the leaf's
    carries it once. The bucket goes in pieces, so that its sum comes back while it is still
    going. Next to the leaf is one rank that adds the leaf's pieces to its own; it and the others
    make the sum among themselves. All get the same bits. Over gloo, from copies on the CPU: a
    link that is worth this is far slower than they are.
    """

    def __init__(self, leaf: int, dtype: torch.dtype, device: torch.device) -> None:
        ranks, self._rank = range(dist.get_world_size()), dist.get_rank()
        self._leaf, self._next = leaf, next(rank for rank in ranks if rank != leaf)
        self._dtype, self._device = dtype, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        pair = sorted((self._leaf, self._next))
        others = [rank for rank in ranks if rank != leaf]
        # One group a direction: what one way has to wait for must not hold up the other.
        groups: list[Any] = [dist.new_group(each, backend="gloo") for each in (pair, pair, others)]
        self._up, self._down, self._inner = groups
        self._thread, self._sending = (ThreadPoolExecutor(1, name) for name in ("leaf", "leaf up"))
        self._flying = Semaphore(_FLYING)

    def send(self, bucket: Bucket) -> Future[Tensor]:
        """See Sender."""
        if self._stream is None:
            return _in(self._thread, self._begin(bucket.flat.to(self._dtype), bucket.flat))
        ready = torch.cuda.current_stream(self._device).record_event()
        return _in(self._thread, lambda: self._through_cpu(bucket.flat, ready), self._device)

    def _through_cpu(self, flat: Tensor, ready: torch.cuda.Event) -> Tensor:
        """Sum what is on a GPU, beside what that still computes."""
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host = flat.to("cpu", self._dtype)
            flat.copy_(self._begin(host, host)())
            self._stream.synchronize()
        return flat

    def _begin(self, part: Tensor, into: Tensor) -> Callable[[], Tensor]:
        """Post what can be at once; returns what does the rest.

        Args:
            part: of this rank. into: where the sum is to be; may be ``part``.
        """
        size = max(_PIECE, len(part) // _PIECES)
        pieces = torch.split(part, size)
        if self._rank == self._leaf:
            sums = torch.empty_like(part)
            comes = torch.split(sums, size)
            waits: list[Any] = [dist.irecv(piece, self._next, self._down) for piece in comes]
            sending = self._sending.submit(self._go_up, pieces)

            def finish() -> Tensor:
                try:
                    for wait in waits:
                        wait.wait()
                        self._flying.release()
                except Exception:
                    self._flying.release(len(waits))  # or the other thread would wait for ever
                    raise
                sending.result()
                return into.copy_(sums)

        elif self._rank == self._next:
            comes = torch.split(torch.empty_like(part), size)
            waits = [dist.irecv(piece, self._leaf, self._up) for piece in comes]

            def finish() -> Tensor:
                backs = list[Any]()
                for piece, come, wait in zip(pieces, comes, waits, strict=True):
                    wait.wait()
                    dist.all_reduce(piece.add_(come), group=self._inner)
                    backs.append(dist.isend(piece, self._leaf, self._down))
                for back in backs:
                    back.wait()
                return into.copy_(part)

        else:

            def finish() -> Tensor:
                for piece in pieces:
                    dist.all_reduce(piece, group=self._inner)
                return into.copy_(part)

        return finish

    def _go_up(self, pieces: Sequence[Tensor]) -> None:
        """Send the leaf's pieces, each when it may."""
        works = list[Any]()
        for piece in pieces:
            self._flying.acquire()
            works.append(dist.isend(piece, self._next, self._up))
        for work in works:
            work.wait()

    def close(self) -> None:
        """See Sender."""
        self._thread.shutdown()
        self._sending.shutdown()
        for group in (self._up, self._down, self._inner):
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


class _Rounded:
    """What torch's hook may take for a process group, and that adds up in bf16."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def size(self) -> int:
        """Ranks."""
        return dist.get_world_size(self._group)

    def allreduce(self, tensors: list[Tensor], _: object) -> "_Work":
        """Of one tensor, in place."""
        (whole,) = tensors
        work = dist.all_reduce(whole.to(torch.bfloat16), group=self._group, async_op=True)
        return _Work(work.get_future().then(lambda future: [whole.copy_(_first(future))]))


@dataclass(frozen=True)
class _Work:
    """An all-reduce under way; ``future`` is of a list of one tensor."""

    future: Future[list[Tensor]]

    def get_future(self) -> Future[list[Tensor]]:
        """See ``future``."""
        return self.future


class _Lane:
    """Some of the buckets, one after another, through groups of its own.

    The hook would send what is not worth two matrices, such as biases, before the first of them.
    Over gloo it travels beside them, through another group (a group has two threads, and the hook
    lets one wait for the other): where latency counts, a third of the time. And the second matrix
    would be begun by gloo's threads, in another order on every rank; so a thread waits for each.

    Attributes:
        power: torch's memory of these buckets. beside: the group of what is not compressed.
        thread: None: on a GPU, whose streams keep the order.
    """

    def __init__(self, number: int, mode: WireMode, device: torch.device) -> None:
        self._device, threaded = device, device.type != "cuda"
        self.thread = ThreadPoolExecutor(1, "powersgd") if threaded else None
        self.beside: Any = dist.new_group() if threaded else None
        self.group: Any = dist.new_group() if number else None  # None: the default one
        self.power = PowerSGDState(
            process_group=_Rounded(self.group) if mode.rounded else self.group,
            matrix_approximation_rank=mode.rank,
            start_powerSGD_iter=_EXACT_AT_FIRST, orthogonalization_epsilon=1e-8,
            compression_stats_logging_frequency=2**62,
        )  # fmt: skip
        self.keep()

    def keep(self) -> None:
        """Remember what :meth:`put_back` is to find."""
        # The hook puts a new error in the old one's place, but writes into the Q's.
        self._kept = (dict(self.power.error_dict), _copies(self.power.q_memory_dict))

    def put_back(self) -> None:
        """As if no step had been since :meth:`keep`."""
        power = self.power
        power.error_dict, power.q_memory_dict = self._kept
        for place in set(power.p_memory_dict) - set(power.q_memory_dict):
            del power.p_memory_dict[place]

    def begin(self, place: int, grads: Sequence[Tensor]) -> None:
        """Make a bucket's first Q, if it has none, alike on all ranks. The hook would draw it from
        torch's own generator, which other threads may be using."""
        power, rank = self.power, self.power.matrix_approximation_rank
        if place in power.p_memory_dict:
            return
        high = wide = 0
        for grad in grads:
            thin = min(len(grad), grad.numel() // len(grad), rank)
            high, wide = high + thin * len(grad), wide + thin * grad.numel() // len(grad)
        noise = torch.randn(wide, generator=torch.Generator().manual_seed(place))
        power.q_memory_dict[place] = noise.to(self._device)
        power.p_memory_dict[place] = torch.empty(high, device=self._device)

    def close(self) -> None:
        """Let go of its thread and groups."""
        if self.thread is not None:
            self.thread.shutdown()
        for group in (self.beside, self.group):
            if group is not None:
                dist.destroy_process_group(group)


class PowerSgdSender(Sender):
    """Sends two thin matrices in place of each gradient matrix; what they leave out, the error,
    is added to the next step's gradient.

    torch's hook takes the mean over ranks. It is given W times a rank's part of the sum, so
    that its mean is the sum, whatever the shares. Its error memory is in the same unit, and
    scaled as the loss is. Where matrices are rounded on the way, it holds what that leaves out,
    too.

    A bucket's second matrix cannot be sent before the sum of the first has come. On a CPU buckets
    take turns in two lanes, so that a link is not idle in between.
    """

    def __init__(self, mode: WireMode, device: torch.device) -> None:
        self._ranks, self._device, self._mode = dist.get_world_size(), device, mode
        self._lanes = [
            _Lane(number, mode, device) for number in range(1 if device.type == "cuda" else _LANES)
        ]

    def begin_at_once(self) -> None:
        """See Sender."""
        for lane in self._lanes:
            lane.power.iter = _EXACT_AT_FIRST

    def send(self, bucket: Bucket) -> Future[Tensor]:
        """See Sender."""
        lane = self._lanes[bucket.place % len(self._lanes)]
        if lane.thread is None:
            return self._sum(bucket, lane)
        return _in(lane.thread, lambda: self._sum(bucket, lane).wait())

    def _sum(self, bucket: Bucket, lane: _Lane) -> Future[Tensor]:
        if lane.power.iter < _EXACT_AT_FIRST:
            bucket.flat.mul_(self._ranks)
            return powerSGD_hook(lane.power, replace(bucket, final=False))
        thin = [grad for grad in bucket.grads if self._mode.thin(grad.shape)]
        rest = [grad for grad in bucket.grads if not self._mode.thin(grad.shape)]
        # One number more: where all is compressed there is still something to send.
        whole = torch.cat([bucket.flat.new_zeros(1), *(grad.flatten() for grad in rest)])
        if self._mode.rounded:
            whole = whole.to(torch.bfloat16)
        sent = dist.all_reduce(whole, group=lane.beside, async_op=True)
        bucket.flat.mul_(self._ranks)
        lane.begin(bucket.place, thin)
        future = powerSGD_hook(lane.power, replace(bucket, grads=thin, final=False))

        def put_back(summed: Future[Tensor]) -> Tensor:
            sent.wait()
            if whole.is_cuda:  # this is another stream than the one that it was made in
                whole.record_stream(torch.cuda.current_stream(self._device))
            parts = torch.split(whole[1:], [grad.numel() for grad in rest])
            for grad, part in zip(rest, parts, strict=True):
                grad.copy_(part.view_as(grad))
            return summed.value()

        return future.then(put_back)

    def settle(self, taken: bool, factor: float) -> None:
        """See Sender."""
        for lane in self._lanes:
            if taken:
                lane.power.iter += 1  # the hook would know of its last bucket, were it one lane
            else:
                lane.put_back()
            if factor != 1.0:
                for error in lane.power.error_dict.values():
                    error.mul_(factor)
            lane.keep()

    def close(self) -> None:
        """See Sender."""
        for lane in self._lanes:
            lane.close()

    def state(self) -> dict[str, Tensor]:
        """See Sender."""
        state = {"iter": torch.tensor(self._lanes[0].power.iter)}
        for power in (lane.power for lane in self._lanes):
            for place in power.p_memory_dict:
                state[f"error.{place}"] = power.error_dict[place].cpu()
                state[f"p.{place}"] = power.p_memory_dict[place].cpu()
                state[f"q.{place}"] = power.q_memory_dict[place].cpu()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See Sender."""
        for lane in self._lanes:
            lane.power.iter = int(state["iter"])
        for key, value in state.items():
            kind, dot, place = key.partition(".")
            if dot:
                power = self._lanes[int(place) % len(self._lanes)].power
                kept = {
                    "error": power.error_dict, "p": power.p_memory_dict, "q": power.q_memory_dict,
                }  # fmt: skip
                kept[kind][int(place)] = value.to(self._device)
        for lane in self._lanes:
            lane.keep()


def make_sender(mode: WireMode, device: torch.device) -> Sender:
    """The sender of a mode."""
    if mode.kind == "powersgd":
        return PowerSgdSender(mode, device)
    if mode.leaf is not None:
        return LeafSender(mode.leaf, _DTYPES.get(mode.kind, torch.float32), device)
    if mode.kind in _DTYPES:
        return RoundingSender(_DTYPES[mode.kind])
    return Sender()


def buckets_of(parameters: Sequence[Tensor], numbers: float) -> list[Bucket]:
    """Buckets of at most so many numbers (or one tensor), filled with noise: to time a sender."""
    groups: list[list[Tensor]] = [[]]
    for parameter in parameters:
        if groups[-1] and sum(p.numel() for p in groups[-1]) + parameter.numel() > numbers:
            groups.append([])
        groups[-1].append(parameter)
    buckets = []
    for place, group in enumerate(groups):
        flat = torch.randn(sum(p.numel() for p in group), device=group[0].device)
        parts = torch.split(flat, [p.numel() for p in group])
        grads = [part.view_as(p) for part, p in zip(parts, group, strict=True)]
        buckets.append(Bucket(place, flat, grads, place == len(groups) - 1))
    return buckets


def _first(future: Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


def _copies(memory: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {place: tensor.clone() for place, tensor in memory.items()}


def _in(
    thread: ThreadPoolExecutor, work: Callable[[], Tensor], device: torch.device | None = None
) -> Future[Tensor]:
    """What the work gives, once the thread has done it; on a GPU, what waits for it waits there."""
    future: Future[Tensor] = Future(devices=[device] if device else None)

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]

    thread.submit(run)
    return future
