"""What an engine is to the training loop, and what both engines share.

An engine owns everything between a micro-batch and a changed parameter: forward,
backward, the wire, averaging, the loss scale, clipping, and the agreement of all ranks
on overflow. The loop owns data, plan, schedule, records and checkpoints.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from timm.optim._optim_factory import create_optimizer_v2
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from motley.clock import Clock
from motley.collectives import everyone
from motley.errors import MotleyError
from motley.memory import in_halves, out_of_memory, release, shortage
from motley.model import Classifier
from motley.named_state import (
    load_model_state,
    load_optimizer_state,
    load_random_state,
    model_state,
    optimizer_state,
    random_state,
)
from motley.options import Config
from motley.plan import Plan
from motley.precision import LossScale
from motley.sampler import Batch
from motley.wire import Sending


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step.

    Attributes:
        loss_sum: over the global batch; None where only this rank's own part is known. Of local
            steps, the mean since the last meeting but one, times the batch.
        grad_norm: of the unscaled gradient before clipping; None after an overflow.
        overflow: the gradient was not finite, nobody stepped; with local steps, not this rank.
        loss_scale: that this step's losses were multiplied by.
        ready_s: what each rank gave to :meth:`Engine.step`; empty if nobody told.
        short: ranks that had not enough memory, and what was found there. If there is one,
            nobody stepped, the parameters and the scale are as before, and the same samples
            are due again.
        again: they are; not with local steps, where these ranks alone took none, for a while.
    """

    loss_sum: float | None
    grad_norm: float | None
    overflow: bool
    loss_scale: float
    ready_s: tuple[float, ...]
    short: Mapping[int, str] = field(default_factory=dict)
    again: bool = True


class Engine(Protocol):
    """The protocol between the loop and ``torch_dist/`` or ``deepspeed/``.

    Attributes:
        loss_weight: on each loss, besides the scale and 1/N: what undoes its own average.
        equal_micro_steps: every micro-batch communicates, so all ranks take equally many,
            and compute cannot be told from communication.
        whole: each rank holds all parameters; else a part of them, and a pass through the model
            is one of all ranks.
        clock: where this rank's time went in the current step.
        optimizer: whose ``param_groups`` the schedule writes the learning rate to.
    """

    loss_weight: int
    equal_micro_steps: bool
    whole: bool
    clock: Clock
    optimizer: torch.optim.Optimizer
    scale: LossScale

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> Tensor:
        """Forward and backward of one micro-batch, as a part of a batch of ``n_global``.

        Computes nothing once memory has ended in this step, but still joins the others.

        Returns:
            The loss of each of its samples, fp32 [n], detached.
        """

    def step(self, loss_sum: Tensor, ready_s: float) -> StepResult:
        """Finish the global batch: communicate, agree on overflow, clip, step.

        Args:
            loss_sum: this rank's losses of the step summed, a scalar.
            ready_s: a time that travels along to all ranks; see motley.recorder.
        """

    def unite(self) -> None:
        """Make the parameters the same on all ranks, where they are not after every step; all
        ranks call it, before an evaluation and before :meth:`state`."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Loss sum, correct answers and number of samples of held-out images, float64 [3]."""

    def state(self) -> dict[str, Tensor]:
        """Everything that does not depend on the number of ranks; all ranks must call it.

        Returns:
            On rank 0, on the CPU: ``model.<name>`` and ``optimizer.<name>.<slot>``, whole
            tensors. Elsewhere it may be empty.
        """

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state`, the same on all ranks."""

    def own_state(self) -> dict[str, Tensor]:
        """What this rank alone holds (random numbers, error feedback), on the CPU."""

    def load_own_state(self, state: dict[str, Tensor]) -> list[str]:
        """Continue from :meth:`own_state` of the same rank of as many ranks.

        Args:
            state: empty where there were more ranks, or fewer.

        Returns:
            What could not be continued, for the user.
        """

    def reconfigure(self, plan: Plan) -> None:
        """Take a new plan at a step boundary."""


@dataclass(frozen=True)
class Seating:
    """What an engine is built on.

    Attributes:
        rank, size: in the process group.
        precisions: of each rank.
        scale: the shared loss scale; this rank's copy.
        plan: of the full batch.
    """

    config: Config
    rank: int
    size: int
    device: torch.device
    precisions: tuple[str, ...]
    scale: LossScale
    plan: Plan


class EngineMaker(Protocol):
    """An engine's class: it makes one, and says beforehand what it can."""

    sending: Sending

    def __call__(self, model: Classifier, seating: Seating) -> Engine:
        """Set an engine on a model."""


def make_optimizer(net: nn.Module, config: Config) -> torch.optim.Optimizer:
    """timm's optimizer ``--opt``, without weight decay on norms and biases.

    As one kernel, where it has that: 3.6 times faster on a CPU too.
    """
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    try:
        with contextlib.suppress(TypeError, RuntimeError):
            return create_optimizer_v2(net, opt=config.opt, **options, fused=True)
        return create_optimizer_v2(net, opt=config.opt, **options)
    except (KeyError, ValueError, AssertionError, TypeError) as error:
        raise MotleyError(f"--opt {config.opt}: timm has no such optimizer ({error})") from None


def a_part(net: nn.Module, ranks: int) -> nn.Module:
    """As many numbers as one of so many ranks keeps of a model, with a gradient of zeros."""
    device = next(net.parameters()).device
    count = -(-sum(parameter.numel() for parameter in net.parameters()) // ranks)
    part = nn.Module()
    part.weight = nn.Parameter(torch.zeros(count, device=device))
    part.weight.grad = torch.zeros(count, device=device)
    return part


class EngineBase:
    """What is the same in both engines, whatever the wire between ranks.

    An engine adds ``sending``, of its :class:`EngineMaker`; ``_accumulate``, which is
    :meth:`Engine.accumulate` with memory enough; ``_abandon``, which puts what is not finite in
    its place when there was not; and ``_send``, which sends what the others wait for and the last
    backward pass has not sent.
    """

    sending: Sending
    whole = True

    def __init__(self, model: Classifier, seating: Seating) -> None:
        self._model, self._seating = model, seating
        self.scale = seating.scale
        self.clock = Clock(seating.device)
        # Gloo copies to a GPU in a stream of its own, for which no future waits.
        self._copies = seating.device.type == "cuda" and dist.get_backend() != "nccl"
        self._short = ""  # of memory, in this step: what was found
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(model.net, seating.config)
        if seating.config.compile:
            model.net.compile()

    def _accumulate(self, batch: Batch, n_global: int, last: bool) -> Tensor:
        raise NotImplementedError

    def _abandon(self, last: bool) -> None:
        pass

    def _send(self) -> None:
        pass

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> Tensor:
        """See :class:`Engine`. Another user may have taken the memory that was free before."""
        losses = None
        if not self._short:
            try:
                losses = self._accumulate(batch, n_global, last)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self._short = shortage(error, self._seating.device)
        if losses is None:
            release()
            self._abandon(last)
            losses = torch.zeros(len(batch.labels), device=self._seating.device)
        if last:
            self._send()
        return losses

    def unite(self) -> None:
        """See :class:`Engine`. They always are."""

    def evaluate(self, batch: Batch) -> Tensor:
        """See :class:`Engine`. In halves if memory does not do for the whole."""
        if not self.whole:
            return self._evaluate_together(batch)
        whole = slice(0, len(batch.labels))
        found = in_halves(lambda part: score(self._model, batch[part]), whole)
        return torch.stack(found).sum(dim=0)

    def _evaluate_together(self, batch: Batch) -> Tensor:
        if len(batch.labels):
            return score(self._model, batch)
        blank = self._model.blank_images(1)
        score(self._model, Batch(blank, batch.labels.new_zeros(1), ()))
        return torch.zeros(3, dtype=torch.float64, device=blank.device)

    def _losses(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Each sample's loss, fp32 [n], and their sum; where every pass communicates.

        A rank without samples computes a blank image, times 0: only a real pass takes part in
        all that the others do, in their order.
        """
        if not len(batch.labels):
            logits = forward(self._model.blank_images(1))
            return logits.new_empty(0), logits.sum() * 0.0
        losses = sample_losses(forward(batch.images), batch, self._seating.config.smoothing)
        return losses, losses.sum()

    def _no_second_try(self, error: Exception, instead: str) -> NoReturn:
        """Memory has ended in a pass that communicates: nobody can do the step again."""
        found = shortage(error, self._seating.device)
        raise MotleyError(
            f"{found}; in a pass in which {self.sending.words}, so the step cannot be done again; "
            f"lower --micro-batch, add --grad-checkpointing, or take {instead}"
        ) from error

    def _tell_short(self, ranks: Sequence[float]) -> dict[int, str]:
        """:attr:`StepResult.short`, if any of ``ranks`` (one flag a rank) is; all call it."""
        if not any(ranks):
            return {}
        found, self._short = everyone(self._short), ""
        return {rank: words for rank, words in enumerate(found) if words}

    def state(self) -> dict[str, Tensor]:
        """See :class:`Engine`. All ranks hold the same, so rank 0 alone copies it."""
        if dist.get_rank() != 0:
            return {}
        net = self._model.net
        return model_state(net) | optimizer_state(net, self.optimizer)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See :class:`Engine`."""
        load_model_state(self._model.net, state)
        load_optimizer_state(self._model.net, self.optimizer, state)

    def own_state(self) -> dict[str, Tensor]:
        """See :class:`Engine`."""
        return random_state(self._seating.device)

    def load_own_state(self, state: dict[str, Tensor]) -> list[str]:
        """See :class:`Engine`."""
        if state:
            load_random_state(state, self._seating.device)
        return []

    def reconfigure(self, plan: Plan) -> None:
        """See :class:`Engine`. Each micro-step is told all that it needs of the plan."""


def check_offload(seating: Seating) -> None:
    """MotleyError if ``--offload`` has nothing to move."""
    if seating.config.offload != "none" and seating.device.type == "cpu":
        raise MotleyError(
            f"--offload {seating.config.offload}: rank {seating.rank} computes on the CPU, where "
            "all is already"
        )


def sample_losses(logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
    """Cross-entropy of each sample, fp32 [n]; fine for n = 0."""
    return functional.cross_entropy(
        logits, batch.labels, label_smoothing=smoothing, reduction="none"
    )


@torch.no_grad()
def score(model: nn.Module, batch: Batch) -> Tensor:
    """Loss sum (without smoothing), correct answers and samples, float64 [3]."""
    model.eval()
    logits = model(batch.images)
    losses = sample_losses(logits, batch, 0.0)
    correct = (logits.argmax(dim=1) == batch.labels).sum()
    model.train()
    return torch.stack(
        [losses.sum().double(), correct.double(), correct.new_tensor(len(losses)).double()]
    )


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """2-norm of all gradients together, a scalar; not finite if any entry is not.

    Of sharded ones, of this rank's part.
    """
    return torch.nn.utils.get_total_norm(_gradients(parameters))


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


@torch.no_grad()
def unscale_and_clip(
    parameters: Sequence[Tensor], norm: Tensor, scale: float, most: float | None
) -> None:
    """Multiply all gradients in place, in one pass; waits for nothing.

    Clips as torch.nn.utils.clip_grad_norm_ does.

    Args:
        norm: of the gradients as they are, scaled; a scalar, the same on all ranks.
        scale: the loss scale in them. most: the norm to clip to, if any.
    """
    if scale == 1.0 and most is None:
        return
    factor = torch.full_like(norm, 1 / scale)
    if most is not None:
        factor *= torch.clamp(most / (norm / scale + 1e-6), max=1.0)
    grads = _gradients(parameters)
    torch._foreach_mul_(grads, factor.to(grads[0].device, grads[0].dtype))
