"""One training step of a user's own loop: weighted gradients, a sum over all ranks, an update.

A rank computes its rows of a global batch in one or several pieces. The rank's gradient is the sum
of the pieces' gradients, each weighted by the piece's fraction of the global batch. The ranks add
up their gradients when the user's code first needs the sum. This happens after the last piece, in
``lab.clip_grad_norm_`` or ``optimizer.step()``.

Between two pieces of a step, ``parameter.grad`` is None: the gradients are stored elsewhere until
the next backward pass. Code that clips or zeroes gradients after each piece thus changes nothing.
"""

import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from motley.comm.collectives import all_gather_floats, leavable
from motley.comm.reducer import Bucket, Reducer
from motley.engines.gradient_sum import drop_absent, wire_device
from motley.engines.named_state import own_rows
from motley.engines.step import unscale_and_clip
from motley.engines.step_timer import HOST, Clock, Laps
from motley.errors import MotleyError, NoMemoryError, NotFiniteError
from motley.library.gradient_exchange import CALLS, OptimizerSum, RankNumbers, SumOutcome
from motley.library.loop_shares import Piece
from motley.library.loop_statistics import LoopStatistics
from motley.library.model_shards import ModelShards
from motley.plan.precision import LossScale

_BY_SCHEDULER = "_wrapped_by_lr_sched"  # torch's mark of a step() that its schedulers know
_STATISTICS = "statistics."  # prefix of a batch norm's buffer among gradients
_ALIKE = 1e-9  # relative difference up to which two corrections are equal


@dataclass
class _Call:
    """Backward calls of one loss in a step: one call for each part of this rank's rows.

    Attributes:
        usual: divisor of the losses, equal on all ranks.
        weight: total weight of this rank's rows so far; None for a call without ``weight=``.
    """

    usual: float
    weight: float | None = None


@dataclass(frozen=True)
class FinishedStep:
    """A training step that all ranks have taken, or skipped after an overflow.

    Attributes:
        piece: this rank's last piece in the step.
        batches: number of global batches whose gradients the script has accumulated in the step.
        numbers: the numbers that each rank has sent with its gradient.
        loss: mean loss of the global batch.
        norm: norm of the gradient before clipping; None if the script does not clip.
        overflow: True if the gradient was not finite, so that no rank stepped.
        loss_scale: loss scale of the step.
        rate: learning rate of the first parameter group of the last optimizer in the step.
        laps: seconds that this rank spent on each activity in the step, such as waiting.
    """

    piece: Piece
    batches: int
    numbers: Sequence[RankNumbers]
    loss: float
    norm: float | None
    overflow: bool
    loss_scale: float
    rate: float
    laps: Laps


class GroupChangedError(Exception):
    """A rank was lost, and the survivors have formed a new group.

    Attributes:
        outcome: result of the collective that was interrupted, received from a survivor that had
            finished it. None: no survivor had finished it.
    """

    def __init__(self, outcome: Any = None) -> None:
        super().__init__("a rank was lost")
        self.outcome = outcome


def _override(owner: Any, name: str, may_run: Callable[..., bool]) -> None:
    """Make a method of one object run only if ``may_run`` returns True.

    The object gets a new subclass of its class. A method that is set on the object itself would
    become a part of a scheduler's ``state_dict``.

    Args:
        owner: the object.
        name: name of the method.
        may_run: function of the method's arguments that returns True if the method may run.
    """
    usual = getattr(type(owner), name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return usual(self, *args, **kwargs) if may_run(*args) else None

    kind = type(owner)
    owner.__class__ = type(kind.__name__, (kind,), {name: method, "__module__": kind.__module__})


class StepGate:
    """The object that turns backward passes over parts of a batch into steps of the optimizers.

    A part of this rank's rows of a global batch is called a piece. An optimizer steps only after
    the last piece of a global batch, with the sum of all ranks' gradients.

    Args:
        names: description of each rank with its host, for messages.
        rank: number of this rank.
        device: device of this rank.
        reducer: object that sums gradients over ranks in the chosen wire mode.
        scale: the loss scale that all ranks share.
        statistics: statistics of the models' batch norms.
        shards: the models if they are sharded over the ranks; None: each rank has whole models.

    Attributes:
        piece: the piece that the user's code computes now; None outside of the loop.
        clock: clock that measures this rank's time by activity.
        reached: function that returns the number of the last step that this rank's loader has
            requested.
        wants_save: function that returns True if this rank requests a checkpoint after the step.
        on_step: function that is called after each step, before the loader is asked for more rows.
        collective: function that runs a collective, and returns its result. The function raises
            GroupChangedError if a rank is lost meanwhile.
        numbers: the numbers that each rank has sent with its gradient in the last step.
        loss: loss of the last step; None before the first step.
        stepped: True if the last call of ``optimizer.step()`` has changed parameters.
        repeats: True if the present global batch will be computed again, because a rank was lost.
        norm: norm of the present step's gradient before clipping; None if it was not clipped.
    """

    def __init__(
        self,
        names: Sequence[str],
        rank: int,
        device: torch.device,
        reducer: Reducer,
        scale: LossScale,
        statistics: LoopStatistics,
        shards: ModelShards | None = None,
    ) -> None:
        self.statistics, self._shards = statistics, shards
        self._names, self._rank, self._device = list(names), rank, device
        self._reducer, self.scale = reducer, scale
        self.piece: Piece | None = None
        self.clock = Clock(device)
        self.reached: Callable[[], int] = lambda: -1
        self.wants_save: Callable[[], bool] = lambda: False
        self.on_step: Callable[[FinishedStep], None] = lambda step: None
        self.collective: Callable[[Callable[[], SumOutcome]], SumOutcome] = lambda work: work()
        self.numbers: Sequence[RankNumbers] = ()
        self.loss: float | None = None
        self.stepped = self.repeats = False
        self._updates: dict[Optimizer, OptimizerSum] = {}
        self._aside: list[tuple[Tensor, Tensor]] = []  # parameters with their gradients
        self._versions: list[tuple[Tensor, int]] = []  # gradients after the last backward pass
        self._known: set[int] = set()  # ids of the gradients after backward passes of the step
        self._parts: list[Tensor] = []  # this rank's parts of gradients, then
        self._norm = 0.0  # norm of these parts at that time
        self._totals: tuple[float, ...] = ()  # weights of the last step, over all ranks
        self._summing: OptimizerSum | None = None  # the one whose sum was asked for last
        self._usual_order: list[OptimizerSum] = []  # order of the sums in the last step
        self._order: list[OptimizerSum] = []  # order of the sums in the present step
        self._can_step = False  # True from the end of that sum until its optimizer steps
        self._stepped_in = -1  # step in which an optimizer has stepped last
        self._start_step()

    def _start_step(self) -> None:
        self._calls: list[_Call] = []
        self._first_call = self._call = 0  # number of backward calls before the batch, and so far
        self._loss: Tensor | float = 0.0
        self._known = set()
        self._rows, self._batches, self._rate = 0, 0, 0.0
        self.norm: float | None = None
        self._overflow = False  # True if a sum of the step was not finite
        self._was_asked = False  # True if an optimizer was to step in the present piece

    # -- pieces

    def begin_piece(self, piece: Piece) -> None:
        """Start to compute a part of this rank's rows, which the loader has read."""
        self.piece, self._call, self._was_asked = piece, self._first_call, False
        self.statistics.begin(piece)
        if self._shards:
            self._shards.begin_piece(is_empty=not piece.rows)
        self._rows += piece.rows
        self.stepped = self.repeats = self._can_step = False
        self.clock.lap("data")

    def repeat_pieces(self) -> None:
        """Discard this rank's gradient of the present global batch, before computing it again.

        Raises:
            NoMemoryError: the script has accumulated gradients of earlier batches, which would be
                lost too.
        """
        if self._first_call:
            raise NoMemoryError(
                "out of memory while the gradients of several batches are accumulated: give "
                "motley.join() a smaller micro_batch, or use a larger batch_size instead of "
                "accumulation"
            )
        rows = self._rows
        for update in self._updates.values():
            update.mark_late()
        self._drop_gradients()
        self._rows = rows

    def begin_part(self, piece: Piece) -> None:
        """Start a smaller part of the present rows, which the rank computes again."""
        self.piece, self._call = piece, self._first_call
        self.statistics.begin(piece)

    def end_piece(self) -> None:
        """End the present part of this rank's rows, when the user's code requests the next rows."""
        piece, self.piece = self.piece, None
        if piece is None:
            return
        if not piece.last:
            self.clock.lap(HOST)
            return
        self._batches += 1
        self.statistics.end_batch()
        if not self._is_summed(piece):  # the user accumulates several batches
            self._first_call = len(self._calls)
            self.clock.lap(HOST)
            return
        assert self.loss is not None
        step = FinishedStep(
            piece, self._batches, self.numbers, self.loss, self.norm, self._overflow,
            self.scale.value, self._rate, self.clock.cut(),
        )  # fmt: skip
        self._usual_order, self._order = self._order, []
        if self._shards:
            self._shards.end_step()
        self._start_step()
        self.clock.lap(HOST)  # the user's code after the step is work before the next one
        self.on_step(step)

    def leave_loop(self) -> None:
        """End the loop over the loader, possibly in the middle of a global batch."""
        if self.piece is not None and not self.piece.last:
            self._aside = []
            self._start_step()
        self.end_piece()

    @property
    def is_within_step(self) -> bool:
        """True from the first backward pass of a step until its gradients are summed."""
        return bool(self._calls) and not (self.piece and self._is_summed(self.piece))

    def count_unused(self) -> int | None:
        """Return the number of global batches whose gradients no optimizer has used yet.

        None: an optimizer has stepped with the present batch, and the user's code for this batch
        may not have ended.
        """
        if self.piece is None:
            return self._batches
        return None if self._stepped_in == self.piece.step else self._batches + 1

    def _is_summed(self, piece: Piece) -> bool:
        """Return True if the step of a piece has already summed the gradients of an optimizer."""
        return any(each.summed == piece.step for each in self._updates.values())

    def drop(self) -> None:
        """Discard all gradients of the present step, because all ranks compute them again."""
        self._forget_sums()
        self._drop_gradients()
        self.repeats = True

    def _forget_sums(self) -> None:
        """Discard all sums that have begun; all ranks call it."""
        self._order = []
        for update in self._updates.values():
            update.forget()

    def _drop_gradients(self) -> None:
        self._aside = []
        self._drop_marks()
        self.statistics.drop()
        for update in self._updates.values():
            for parameter in update.parameters():
                parameter.grad = None
        self._start_step()

    @property
    def is_open(self) -> bool:
        """True if the user's code may change parameters and schedules now."""
        return self.piece is None or (self.piece.last and not self.repeats)

    # -- backward

    def backward(
        self, loss: Tensor, weight: float | Tensor | None, reduction: str, options: dict[str, Any]
    ) -> None:
        """Run the backward pass of one loss of the present rows; see ``Lab.backward``."""
        piece = self._check_call(loss, reduction)
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        call = self._get_call(piece, weight is not None)
        part = float(piece.rows if weight is None else weight)
        if not (math.isfinite(part) and part >= 0):
            raise MotleyError(
                f"weight={part} is not a number of 0 or more; give the sum of the weights of the "
                "piece's rows, such as its number of tokens"
            )
        sending = self._open_sum(piece)
        factor = 1.0 if reduction == "sum" else part / call.usual
        if piece.rows:
            if call.weight is not None:
                call.weight += part
            self._loss = self._loss + loss.detach() * factor
        if piece.rows or self._shards:  # with shards, the other ranks need this pass
            factor *= self.scale.value * (self._shards.loss_factor if self._shards else 1.0)
            with self.statistics.paused():
                (loss if factor == 1.0 else loss * factor).backward(**options)  # type: ignore[no-untyped-call]
        if self._shards:
            self._shards.check_blocks()
        if sending:
            sending.flush()
        self.clock.lap("compute")
        if piece.last:
            self._mark_gradients()
        else:
            self._set_aside()

    def _open_sum(self, piece: Piece) -> OptimizerSum | None:
        """Start the next optimizer's sum if this backward pass probably completes its gradients.

        All ranks sum for the optimizers in the order of the previous step.

        Returns:
            The sum that has started, or None.
        """
        done = len(self._order)
        update = self._usual_order[done] if done < len(self._usual_order) else None
        if update and update.has_begun:
            update.mark_late()
        elif update and piece.last and update.usual_call == self._call:
            update.open()
            return update
        return None

    def _check_call(self, loss: Tensor, reduction: str) -> Piece:
        piece = self.piece
        if piece is None:
            raise MotleyError(
                "lab.backward() was called outside of a loop over lab.loader(...), so nothing says "
                "which rows the loss belongs to: call it inside that loop"
            )
        if loss.dim():
            raise MotleyError(
                f"lab.backward() was given a loss of shape {tuple(loss.shape)}: take its mean over "
                'the rows first, or its sum with reduction="sum"'
            )
        if reduction not in ("mean", "sum"):
            raise MotleyError(f'reduction={reduction!r} is neither "mean" nor "sum"')
        if self._was_asked and not piece.last:
            raise MotleyError(
                "a backward pass follows optimizer.step() within one batch, as in a GAN. This "
                "rank computes its rows in several pieces, and the second pass would use "
                "parameters from before the step: leave out micro_batch"
            )
        return piece

    def _get_call(self, piece: Piece, weighs: bool) -> _Call:
        if self._call == len(self._calls):
            usual, weight = float(piece.global_rows), None
            if weighs:
                place = sum(call.weight is not None for call in self._calls)
                if place == CALLS:
                    raise MotleyError(
                        f"a step has more than {CALLS} backward calls with weight=: add the "
                        "losses up, and call lab.backward() once"
                    )
                usual, weight = (self._totals or (usual,))[0], 0.0  # alike for all, to compare them
            self._calls.append(_Call(usual, weight))
        call = self._calls[self._call]
        if weighs != (call.weight is not None):
            raise MotleyError(
                "lab.backward() got weight= for one piece of a batch and not for another: give it "
                "for all pieces or for none"
            )
        self._call += 1
        return call

    def _mark_gradients(self) -> None:
        """Store torch's version counters of all gradients, to detect later changes."""
        gradients = [each.grad for each in self._trained() if each.grad is not None]
        self._versions = [(each, each._version) for each in gradients]
        self._known.update(map(id, gradients))
        if self._shards:  # an operation on a list of DTensors changes no version
            self._shards.show_gradients()
            with torch.no_grad():
                self._parts = [each for each in map(own_rows, gradients) if each.numel()]
            self._norm = float(torch.nn.utils.get_total_norm(self._parts))

    def _are_changed(self) -> bool:
        """Return True if a gradient has changed since the last backward pass."""
        norm = float(torch.nn.utils.get_total_norm(self._parts))
        if norm != self._norm and not math.isnan(norm):
            return True
        return any(gradient._version != version for gradient, version in self._versions)

    def _drop_marks(self) -> None:
        self._versions, self._parts, self._norm = [], [], 0.0

    def _set_aside(self) -> None:
        for parameter in self._trained():
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def _trained(self) -> list[Tensor]:
        """Return all parameters that the optimizers train, each parameter once."""
        return list(dict.fromkeys(p for each in self._updates.values() for p in each.parameters()))

    # -- the user's objects

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Let an optimizer step once per global batch, with the gradient of all ranks."""
        known = optimizer in self._updates
        self._updates[optimizer] = (
            self._shards.make_sum(optimizer)
            if self._shards
            else OptimizerSum(optimizer, self._begin_sum)
        )
        if known:
            return
        usual = optimizer.step

        def step(_: Optimizer, closure: Any = None) -> Any:
            if closure is not None:
                raise MotleyError(
                    f"{type(optimizer).__name__}.step() was given a closure, which computes the "
                    "loss again on this rank and not on the others: use an optimizer without a "
                    "closure"
                )
            if not self.add_up(optimizer):
                return None
            assert self.piece is not None
            self._stepped_in = self.piece.step
            result = usual()
            self.stepped, self._can_step = True, False
            self.clock.lap("opt")
            return result

        if hasattr(usual, _BY_SCHEDULER):
            setattr(step, _BY_SCHEDULER, True)
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def add_scaler(self, scaler: Any) -> None:
        """Let a ``torch.amp.GradScaler`` use the gradient of all ranks, once per global batch."""

        def may_step(optimizer: Optimizer, *_: Any) -> bool:
            return self.add_up(optimizer)

        _override(scaler, "unscale_", may_step)
        _override(scaler, "step", may_step)
        self.add_gated(scaler, "update")

    def add_gated(self, owner: Any, name: str) -> None:
        """Let a method of an object run only once per global batch, in this rank's last piece.

        The method does not run in a global batch that will be repeated.

        Args:
            owner: object with the method, such as a scheduler.
            name: name of the method.
        """
        _override(owner, name, lambda *_: self.is_open)

    def add_up_for(self, parameters: Sequence[Tensor]) -> bool:
        """Sum the gradients of every optimizer that has one of the parameters.

        See :meth:`add_up`.
        """
        chosen = set(map(id, parameters))
        for optimizer, update in self._updates.items():
            if chosen.intersection(map(id, update.parameters())) and not self.add_up(optimizer):
                return False
        return self.is_open

    # -- the sum over all ranks

    def add_up(self, optimizer: Optimizer) -> bool:
        """Sum an optimizer's gradients over all ranks, once per step.

        Returns:
            True if the optimizer may step.

        Raises:
            MotleyError: the ranks cannot add up their gradients.
        """
        self._was_asked = True
        update, piece = self._updates[optimizer], self.piece
        if not self.is_open:
            return False
        if piece is None:
            raise MotleyError(
                "optimizer.step() was called outside of a loop over lab.loader(...), where it has "
                "no gradient: call it inside that loop"
            )
        if update.summed == piece.step:
            return update.may_step
        gradients = [each.grad for each in update.parameters() if each.grad is not None]
        if not self._calls or any(id(each) not in self._known for each in gradients):
            raise MotleyError(
                f"{type(optimizer).__name__}.step() found no lab.backward() in this batch, or a "
                "gradient that lab.backward() did not compute: write lab.backward(loss) instead "
                "of loss.backward(), for each loss"
            )
        if self._are_changed():
            raise MotleyError(
                "the gradient was changed between lab.backward() and optimizer.step(), before the "
                "ranks had added up their gradients: use lab.clip_grad_norm_() to clip it, and "
                "pass a GradScaler to lab.prepare()"
            )
        self.clock.lap("compute", ready=True)
        self._rate = float(optimizer.param_groups[0]["lr"])
        self._summing, self._can_step, is_here = update, False, True
        try:
            outcome = self.collective(lambda: self._sum(update, piece))
        except GroupChangedError as change:
            if change.outcome is None:
                self._check_repeatable(piece)
                self.drop()
                return False
            # Another rank has finished the sum. This one has received the sum, or the parameters.
            outcome, is_here = change.outcome, self._can_step
        self._drop_marks()
        self.numbers, self.loss, self._totals = outcome.numbers, outcome.loss, outcome.totals
        self._overflow |= outcome.overflow
        self.scale.update(outcome.overflow)
        self._order.append(update)
        update.summed, update.may_step = piece.step, is_here and not outcome.overflow
        self.stepped = not is_here and not outcome.overflow
        self._can_step = update.may_step
        return update.may_step

    def _check_repeatable(self, piece: Piece) -> None:
        """Raise MotleyError if the ranks have already summed gradients of the batch to repeat."""
        if self._is_summed(piece):
            raise MotleyError(
                "a rank was lost after one of several optimizers had stepped with a batch, and "
                "before another had, so the batch cannot be computed again: start the script "
                "again, and lab.resume() continues from the last lab.save()"
            )

    def take_sum(self) -> dict[str, Tensor] | None:
        """Return the last summed gradients, and the running statistics of batch norms, by name.

        A gradient's name is the number of its parameter. None: the optimizer has already stepped
        with the summed gradients.
        """
        if not self._can_step or self._summing is None:
            return None
        parameters = enumerate(self._summing.parameters())
        gradients = {f"{n}": each.grad for n, each in parameters if each.grad is not None}
        buffers = self.statistics.get_buffers()
        return gradients | {f"{_STATISTICS}{name}": each for name, each in buffers.items()}

    def load_sum(self, gradients: Mapping[str, Tensor]) -> None:
        """Load a sum of gradients that another rank has returned from :meth:`take_sum`.

        This rank had not finished the sum when a rank was lost.
        """
        assert self._summing is not None
        for number, parameter in enumerate(self._summing.parameters()):
            gradient = gradients.get(str(number))
            parameter.grad = None if gradient is None else gradient.to(parameter)
        for name, buffer in self.statistics.get_buffers().items():
            buffer.copy_(gradients[f"{_STATISTICS}{name}"])
        self._can_step = True

    def _sum(self, update: OptimizerSum, piece: Piece) -> SumOutcome:
        """Sum an optimizer's gradients over all ranks, and divide by the total row weight."""
        rates = update.list_rates()
        while True:
            absent, sums = update.wait()
            finite: Tensor | float = 1.0
            if self.scale.dynamic:
                finite = torch.nn.utils.get_total_norm(sums).isfinite()
            own = RankNumbers(
                piece.step, self._measure_own_s(), self.reached(), self._rows, self._loss,
                finite, len(absent), float(update.is_late), self._call, rates[0],
                float(zlib.crc32(struct.pack(f"{len(rates)}d", *rates))),
                float(self.wants_save()),
                tuple(call.weight for call in self._calls if call.weight is not None),
            )  # fmt: skip
            numbers = [
                RankNumbers.from_row(row) for row in all_gather_floats(own.as_row(), can_leave=True)
            ]
            self.clock.lap("sync")
            self._check_numbers(numbers)
            if not any(each.is_late for each in numbers):
                break
            self._reducer.after_step(False, 1.0)
            update.forget()
        update.take()
        self.statistics.unite()
        calls = {int(each.call) for each in numbers}
        update.usual_call = calls.pop() if len(numbers) > 1 and len(calls) == 1 else None
        parameters = update.summed_parameters
        if all(each.absent for each in numbers):
            drop_absent(parameters, absent, wire_device(self._device))
        totals = tuple(map(math.fsum, zip(*(each.weights for each in numbers), strict=True)))
        correction = self._get_correction(totals)
        overflow = not all(each.finite for each in numbers)
        zero = torch.zeros((), device=self._device)
        factor = None if correction is None else torch.tensor(correction, dtype=torch.float64)
        unscale_and_clip(parameters, zero, self.scale.value, None, factor)
        self._reducer.after_step(not overflow, 1.0)
        loss = math.fsum(float(each.loss) for each in numbers)
        return SumOutcome(tuple(numbers), loss / (correction or 1.0), overflow, totals)

    def _measure_own_s(self) -> float:
        if self._shards is None:
            return self.clock.measure_own_s()
        return self.clock.measure_own_s(self._shards.measure_compute_s(self.clock.at_once))

    def join_group(self, names: Sequence[str], rank: int, reducer: Reducer) -> None:
        """Continue training in another process group.

        Args:
            names: description of each rank with its host, for messages.
            rank: number of this rank in the new group.
            reducer: object that sums gradients over the new group in the chosen wire mode.
        """
        self._names, self._rank, self._reducer = list(names), rank, reducer
        self._forget_sums()
        self.statistics.drop()  # the same on all ranks

    def _begin_sum(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        return leavable(self._reducer.send(bucket), self._device)

    def _check_numbers(self, numbers: Sequence[RankNumbers]) -> None:
        """Raise MotleyError if steps or learning rates differ, or a loss is not finite."""
        steps = {each.step for each in numbers}
        calls = {len(each.weights) for each in numbers}
        if len(steps) > 1 or len(calls) > 1:
            listed = ", ".join(
                f"{name}: batch {int(each.step)}, {len(each.weights)} weighted losses"
                for name, each in zip(self._names, numbers, strict=True)
            )
            raise MotleyError(
                f"optimizer.step() was called in different batches on different ranks ({listed}). "
                "Ranks read their rows in different numbers of pieces, so a condition that counts "
                "passes through the loop differs between ranks: use lab.batch in that condition, "
                "or a larger batch_size instead of accumulation"
            )
        if len({each.rates for each in numbers}) > 1:
            listed = ", ".join(
                f"{name}: {each.rate:g}" for name, each in zip(self._names, numbers, strict=True)
            )
            raise MotleyError(
                f"the learning rates differ between ranks (in the first group, {listed}): call "
                "the scheduler on all ranks, give it a number that lab.reduce() has added up, and "
                "change rates by hand only by lab.batch"
            )
        bad = [rank for rank, each in enumerate(numbers) if not math.isfinite(each.loss)]
        if bad and not self.scale.dynamic:
            indices = ", ".join(map(str, self.piece.indices[:8])) if self.piece else ""
            own = f"; the rows of its last piece have the indices {indices}" * (self._rank in bad)
            raise NotFiniteError(
                f"the loss of {self._names[bad[0]]} is not finite in step "
                f"{int(numbers[0].step)}{own}: lower the learning rate, clip with "
                "lab.clip_grad_norm_(), or look at these rows"
            )

    def _get_correction(self, totals: Sequence[float]) -> float | None:
        """Return the number by which to divide the gradient; None if no division is needed.

        Args:
            totals: total weight of all ranks' rows, for each backward call with ``weight=``.
        """
        usual = [call.usual for call in self._calls if call.weight is not None]
        if not totals:
            return None
        ratios = [total / divisor for total, divisor in zip(totals, usual, strict=True)]
        if len(ratios) < len(self._calls):
            ratios.append(1.0)  # a loss by rows, which is exact
        if min(ratios) <= 0:
            raise MotleyError(
                "the weights of all rows of a global batch are 0, so its mean loss has no value: "
                "leave such rows out of the data set"
            )
        if max(ratios) > min(ratios) * (1 + _ALIKE):
            raise MotleyError(
                "a step has several losses with different weights, which one sum of gradients "
                "cannot divide by their totals: add the losses up and call lab.backward() once, "
                "or give all of them the same weight="
            )
        return ratios[0]
