"""The sum of gradients over all ranks, sent during or after the last backward pass of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from motley.comm.reducer import Bucket, as_real, empty_bucket, grouped

_BUCKET = 2**25  # numbers; twice as many took two H200s 5 % longer, half as many 11 %
_EARLY_BUCKET = 2**23  # numbers in a bucket that is sent during a backward pass


class GradientSum:
    """The sum of some parameters' gradients over all ranks, in buckets.

    Args:
        parameters: the parameters, equal on all ranks.
        begin: function that starts to sum a bucket over all ranks in place, and returns a future.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        begin: Callable[[Bucket], torch.futures.Future[Tensor]],
    ) -> None:
        self._parameters, self._begin = list(parameters), begin
        self._groups = grouped(self._parameters, _BUCKET)

    def make_bucket(self, place: int, dtype: torch.dtype | None = None) -> Bucket:
        """Return a bucket with uninitialised memory for its gradients.

        Args:
            place: number of the bucket.
            dtype: dtype of the bucket; None: dtype of the parameters.
        """
        final = place == len(self._groups) - 1
        return empty_bucket(place, self._groups[place], final, dtype)

    def add_up(
        self,
        room: Callable[[int], Bucket] | None = None,
        note: Callable[[Sequence[Tensor]], None] = lambda parameters: None,
    ) -> list[int]:
        """Replace each gradient by its sum over the ranks. All ranks call it.

        A rank without a gradient of a parameter sends zeros. Afterwards every parameter has a
        gradient on every rank.

        Args:
            room: function that returns memory for the bucket of a given number; None:
                use :meth:`make_bucket`.
            note: function that is called with the parameters of each bucket while the bucket is
                sent. The gradients of these parameters are then still this rank's own.

        Returns:
            The indices of the parameters that had no gradient on this rank.
        """
        sent = []
        absent = [place for place, p in enumerate(self._parameters) if p.grad is None]
        for place, parameters in enumerate(self._groups):
            bucket = (room or self.make_bucket)(place)
            _fill(bucket.grads, parameters)
            future = self._begin(bucket)
            note(parameters)
            is_rounded = bucket.flat.dtype != as_real(parameters[0]).dtype
            if not is_rounded:
                _take(parameters, bucket.grads)  # frees the memory of the old gradients
            sent.append((future, parameters, bucket.grads, is_rounded))
        for future, parameters, sums, is_rounded in sent:
            future.wait()
            if is_rounded:
                _take(parameters, sums)
        return absent


@dataclass(frozen=True)
class _Sent:
    """A bucket whose sum over the ranks has started.

    Attributes:
        bucket: the bucket.
        future: future of the bucket's sum.
        absent: indices of the bucket's parameters that had no gradient on this rank.
    """

    bucket: Bucket
    future: torch.futures.Future[Tensor]
    absent: Sequence[int]


class EarlySum:
    """The sum of some parameters' gradients over all ranks, sent while a backward pass computes.

    All ranks send the buckets in one order, from the last parameter to the first. A bucket is sent
    when all gradients of this bucket and of all earlier buckets are computed. The gradients
    themselves stay unchanged until :meth:`take`, so that :meth:`forget` can discard a sum.

    Args:
        parameters: the parameters, equal on all ranks.
        begin: function that starts to sum a bucket over all ranks in place, and returns a future.

    Attributes:
        parameters: the parameters, in the order of their indices.
        is_late: True if a gradient has changed after its bucket was sent. The sum is then wrong.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        begin: Callable[[Bucket], torch.futures.Future[Tensor]],
    ) -> None:
        self.parameters, self._begin = list(reversed(parameters)), begin
        self._groups = grouped(self.parameters, _EARLY_BUCKET)
        self._index = {id(each): index for index, each in enumerate(self.parameters)}
        self._place = {
            id(each): place for place, group in enumerate(self._groups) for each in group
        }
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for each in self.parameters
        ]
        self.forget()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def forget(self) -> None:
        """Discard a sum that has started. This rank keeps its own gradients."""
        self._sent: list[_Sent] = []
        self._missing = list(map(len, self._groups))  # gradients that each bucket waits for
        self._is_open = self.is_late = False
        self._failure: Exception | None = None

    @property
    def has_begun(self) -> bool:
        """True from the call of :meth:`open` to the call of :meth:`take` or :meth:`forget`."""
        return self._is_open or bool(self._sent)

    def open(self) -> None:
        """Make the next backward pass send each bucket as soon as the bucket is complete.

        The caller calls it before the last backward pass of a step.
        """
        self._is_open = True

    def _note(self, parameter: Tensor) -> None:
        """Send each bucket that the gradient of a parameter completes. Autograd calls it."""
        if not self._is_open:
            return
        place = self._place[id(parameter)]
        self.is_late |= place < len(self._sent)
        self._missing[place] -= 1
        while len(self._sent) < len(self._groups) and self._missing[len(self._sent)] <= 0:
            if not self._send():
                return

    def _send(self) -> bool:
        """Send the next bucket, and return False if sending fails, as after a lost rank."""
        place = len(self._sent)
        group = self._groups[place]
        try:
            with torch.no_grad():
                bucket = empty_bucket(place, group, place == len(self._groups) - 1)
                _fill(bucket.grads, group)
                absent = [self._index[id(each)] for each in group if each.grad is None]
                self._sent.append(_Sent(bucket, self._begin(bucket), absent))
        except Exception as error:  # wait() raises it, since autograd would change its type
            self._failure, self._is_open = error, False
        return self._failure is None

    def flush(self) -> None:
        """Send the remaining buckets, after the backward pass."""
        self._is_open = False
        while self._failure is None and len(self._sent) < len(self._groups):
            self._send()

    def wait(self) -> list[int]:
        """Send the remaining buckets, and wait for all sums. All ranks call it.

        A rank without a gradient of a parameter sends zeros.

        Returns:
            The indices of the parameters that had no gradient on this rank.
        """
        self.flush()
        if self._failure is not None:
            raise self._failure
        for sent in self._sent:
            sent.future.wait()
        return [index for sent in self._sent for index in sent.absent]

    @property
    def sums(self) -> list[Tensor]:
        """Sum of each parameter's gradients over the ranks, after :meth:`wait`.

        The sum of complex gradients is a real view.
        """
        return [each for sent in self._sent for each in sent.bucket.grads]

    def take(self) -> None:
        """Replace each gradient by its sum over the ranks.

        Afterwards every parameter has a gradient.
        """
        for group, sent in zip(self._groups, self._sent, strict=True):
            _take(group, sent.bucket.grads)
        self.forget()


def drop_absent(parameters: Sequence[Tensor], absent: Sequence[int], wire: torch.device) -> None:
    """Set the gradient of each parameter to None if no rank has computed the gradient.

    Momentum and weight decay then do not change these parameters, just as in training on one host.
    All ranks call this function.

    Args:
        parameters: the parameters, equal on all ranks.
        absent: indices of the parameters that had no gradient on this rank.
        wire: device of the tensors that the process group can send.
    """
    count = torch.zeros(len(parameters), device=wire)
    count[list(absent)] = 1.0
    dist.all_reduce(count)
    for place in (count == dist.get_world_size()).nonzero().flatten().tolist():
        parameters[place].grad = None


def wire_device(device: torch.device) -> torch.device:
    """Return the device on which a tensor must be, so that the process group can send it.

    Args:
        device: device of the rank.
    """
    return device if dist.get_backend() == "nccl" else torch.device("cpu")


def _fill(places: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Copy the parameters' gradients into tensors. A missing gradient counts as zeros.

    Args:
        places: tensors to write to.
        parameters: parameters with their gradients.
    """
    made = [(place, p.grad) for place, p in zip(places, parameters, strict=True)]
    pairs = [(place, as_real(grad)) for place, grad in made if grad is not None]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [grad for _, grad in pairs])
    for place, grad in made:
        if grad is None:
            place.zero_()


def _take(parameters: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    """Set each parameter's gradient to its sum over the ranks.

    A sum in the parameter's dtype becomes the gradient itself, without a copy. A sum in another
    dtype, such as the 16 bits in which gradients were sent, is copied into the existing gradient.

    Args:
        parameters: the parameters.
        sums: for each parameter, the sum of its gradients.
    """
    rounded = []
    for parameter, summed in zip(parameters, sums, strict=True):
        result = summed
        if parameter.is_complex():
            result = torch.view_as_complex(summed.to(as_real(parameter).dtype))
        if parameter.grad is None or result.dtype == parameter.dtype:
            parameter.grad = result.to(parameter.dtype)
        else:
            rounded.append((parameter.grad, result))
    if rounded:
        torch._foreach_copy_([grad for grad, _ in rounded], [result for _, result in rounded])


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor]) -> None:
    """Copy rank 0's values to all ranks, in place. All ranks call it."""
    for group in grouped(tensors, _BUCKET):
        flat = torch.cat([tensor.flatten() for tensor in group])
        dist.broadcast(flat, src=0)
        parts = torch.split(flat, [tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
