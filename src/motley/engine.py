"""What an engine is to the training loop, and what both engines share.

An engine owns everything between a micro-batch and a changed parameter: forward,
backward, the wire, averaging, the loss scale, clipping, and the agreement of all ranks
on overflow. The loop owns data, plan, schedule, records and checkpoints.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from timm.optim._optim_factory import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional

from motley.errors import MotleyError
from motley.model import Classifier
from motley.options import Config
from motley.plan import Plan
from motley.precision import LossScale
from motley.sampler import Batch


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step.

    Attributes:
        loss_sum: over the global batch.
        grad_norm: of the unscaled gradient before clipping; None after an overflow.
        overflow: the gradient was not finite, nobody stepped.
        loss_scale: that this step's losses were multiplied by.
        ready_s: seconds of data and compute of each rank until its own gradient was
            ready; None where the engine cannot tell compute from communication.
    """

    loss_sum: float
    grad_norm: float | None
    overflow: bool
    loss_scale: float
    ready_s: tuple[float, ...] | None


class Engine(Protocol):
    """The protocol between the loop and ``torch_dist/`` or ``deepspeed/``.

    Attributes:
        equal_micro_steps: every micro-batch communicates, so all ranks take equally many.
        clock: where this rank's time went in the current step.
        optimizer: whose ``param_groups`` the schedule writes the learning rate to.
    """

    equal_micro_steps: bool
    clock: "Clock"
    optimizer: torch.optim.Optimizer
    scale: LossScale

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> Tensor:
        """Forward and backward of one micro-batch, as a part of a batch of ``n_global``.

        Returns:
            The loss of each of its samples, fp32 [n], detached.
        """

    def step(self, loss_sum: Tensor) -> StepResult:
        """Finish the global batch: communicate, agree on overflow, clip, step.

        Args:
            loss_sum: this rank's losses of the step summed, a scalar.
        """

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

    def load_own_state(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`own_state` of the same rank of as many ranks."""

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


EngineMaker = Callable[[Classifier, Seating], Engine]


class Clock:
    """Cuts one rank's time into named laps that sum to the whole.

    On a GPU the laps are of the device's own stream, by events, so that work queued
    ahead is counted where it runs and nothing has to be waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.restart()

    def restart(self) -> None:
        """Forget all laps; the next one starts now."""
        self._marks = [("", self._now())]

    def lap(self, name: str) -> None:
        """End a lap: the time since the last mark was spent on ``name``."""
        self._marks.append((name, self._now()))

    def seconds(self, name: str) -> float:
        """Time spent on ``name`` so far; waits for the device to get there."""
        total = 0.0
        for (_, start), (lap, end) in zip(self._marks, self._marks[1:], strict=False):
            if lap == name:
                total += self._between(start, end)
        return total

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def make_optimizer(net: nn.Module, config: Config) -> torch.optim.Optimizer:
    """timm's optimizer ``--opt``, without weight decay on norms and biases."""
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            net, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay
        )
    except (KeyError, ValueError, AssertionError, TypeError) as error:
        raise MotleyError(f"--opt {config.opt}: timm has no such optimizer ({error})") from None
    return optimizer


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


def exchange(values: Sequence[Tensor | float]) -> list[list[float]]:
    """Every rank's numbers, by rank, in fp64. All ranks must call it."""
    wire = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    own = torch.stack([torch.as_tensor(value).to(wire, torch.float64) for value in values])
    table = own.new_empty(dist.get_world_size() * len(own))
    dist.all_gather_into_tensor(table, own)
    rows: list[list[float]] = table.view(-1, len(own)).tolist()
    return rows


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """2-norm of all gradients together, a scalar; not finite if any entry is not."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(grads)


@torch.no_grad()
def scale_gradients(parameters: Sequence[Tensor], factor: float) -> None:
    """Multiply all gradients in place: unscaling and clipping in one pass."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if factor != 1.0:
        torch._foreach_mul_(grads, factor)


def clip_factor(norm: float, most: float | None) -> float:
    """What to multiply a gradient of this norm with, as torch.nn.utils.clip_grad_norm_ does."""
    return 1.0 if most is None else min(1.0, most / (norm + 1e-6))


def model_state(net: nn.Module) -> dict[str, Tensor]:
    """``model.<name>``: parameters and buffers, on the CPU."""
    return {f"model.{name}": value.detach().cpu() for name, value in net.state_dict().items()}


def load_model_state(net: nn.Module, state: dict[str, Tensor]) -> None:
    """Continue from :func:`model_state`; MotleyError if it is of another model."""
    model = {
        name.removeprefix("model."): value
        for name, value in state.items()
        if name.startswith("model.")
    }
    try:
        net.load_state_dict(model)
    except RuntimeError as error:
        raise MotleyError(
            f"the checkpoint is of another model: {' '.join(str(error).split())[:300]}; give the "
            "--model, --dataset and --img-size that it was made with"
        ) from None


def optimizer_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``optimizer.<parameter>.<slot>``, on the CPU; empty before the first step."""
    return {
        f"optimizer.{name}.{slot}": torch.as_tensor(value).detach().cpu()
        for name, parameter in net.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def slots_of(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's slots of one parameter, out of :func:`optimizer_state`."""
    prefix = f"optimizer.{name}."
    return {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}


def load_optimizer_state(
    net: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]
) -> None:
    """Continue from :func:`optimizer_state`."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots = {number: slots_of(names[parameter], state) for number, parameter in enumerate(ordered)}
    packed = optimizer.state_dict()
    packed["state"] = {number: found for number, found in slots.items() if found}
    optimizer.load_state_dict(packed)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """This process's random number generators."""
    state = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Continue from :func:`random_state`."""
    torch.set_rng_state(state["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in state:
        torch.cuda.set_rng_state(state["rng.cuda"], device)
