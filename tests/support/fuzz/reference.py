"""What a case should come to: one process, whole batches, no wrapper, no history but the user's.

Only the data (which samples, how they look), the model and the optimizer are Motley's; the step,
the schedule and the count of samples are written again here, in as few lines as they take.
"""

import copy
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz.cases import size_after
from torch import nn
from torch.nn import functional

from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.data.batch import Batch
from motley.data.loader import Loader
from motley.data.order import Order
from motley.engines.optimizer import make_optimizer
from motley.plan.plan import make_plan
from motley.plan.ramp import ramp_of
from motley.tasks.find import task_of
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net


@dataclass
class Step:
    """One step of the reference.

    Attributes:
        end: it is the last of its epoch.
    """

    epoch: int
    loss: float
    norm: float
    lr: float
    samples: tuple[int, ...]
    end: bool


@dataclass
class Trained:
    """A reference so far: what the steps were, and the evaluations, by the steps taken before."""

    steps: list[Step] = field(default_factory=list)
    evaluations: dict[int, tuple[float, float]] = field(default_factory=dict)


class Reference:
    """Trains a case's recipe; :meth:`rewind` and other options make its history.

    Args:
        dtype: fp32, or fp64 to see how far rounding alone takes a run.
        noise: added to each gradient, times its largest number: what another order of sums does,
            of which some optimizers make a step in the other direction.
        draw: which noise.
    """

    def __init__(
        self, config: Config, dtype: torch.dtype, noise: float = 0.0, draw: int = 0
    ) -> None:
        self._dtype, self._noise = dtype, noise
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dice = torch.Generator(self._device).manual_seed(draw)
        self.configure(config)
        self.trained, self._states = Trained(), list[Any]()
        self._epoch = self._consumed = 0

    def configure(self, config: Config) -> None:
        """Begin with these options, or go on with them."""
        self._config, self._task = config, task_of(config)
        old = getattr(self, "_model", None)
        net = build_net(self._task, config).to(self._dtype)
        if old is not None:
            net.load_state_dict(old.net.state_dict())
        self._model = TaskModel(self._task, net, "fp32", self._device)
        optimizer = make_optimizer(net, config)
        as_made = copy.deepcopy(optimizer.state_dict()["param_groups"])
        if old is not None:
            _hand_over(old.net, self._optimizer, self._as_made, net, optimizer)
        self._optimizer, self._as_made = optimizer, as_made
        # Which knows of no batch that grows.
        whole = dataclasses.replace(config, batch_size=int(config.batch_size))
        self._loader = Loader(self._task, whole, 0, self._device)
        self.samples = Order(
            len(self._task.data(held_out=False)), config.seed, config.data_fraction
        ).epoch_samples

    # -- history

    def rewind(self, step: int) -> None:
        """Back to where ``step`` steps had been taken."""
        if step == len(self.trained.steps):
            return
        model, optimizer, self._epoch, self._consumed = self._states[step]
        self._model.net.load_state_dict(model)
        self._optimizer.load_state_dict(copy.deepcopy(optimizer))
        del self._states[step:], self.trained.steps[step:]
        self.trained.evaluations = {
            taken: found for taken, found in self.trained.evaluations.items() if taken <= step
        }

    def train(self, skipped: set[int]) -> Trained:
        """Go on to the end of the run.

        Args:
            skipped: steps whose gradient overflows.
        """
        config = self._config
        while self._epoch < config.epochs:
            step = len(self.trained.steps)
            if config.max_steps is not None and step >= config.max_steps:
                break
            self._states.append((
                copy.deepcopy(self._model.net.state_dict()),
                copy.deepcopy(self._optimizer.state_dict()), self._epoch, self._consumed,
            ))  # fmt: skip
            self._step(step in skipped)
            if self.trained.steps[-1].end:
                self._evaluate()
        if len(self.trained.steps) not in self.trained.evaluations:
            self._evaluate()
        return self.trained

    def _step(self, skip: bool) -> None:
        config, plan = self._config, make_plan(self._size(), (1.0,), (10**6,), EXACT)
        lr = self._learning_rate()
        part, micro = next(iter(self._loader.steps(self._epoch, self._consumed, plan)))
        ((batch, _),) = micro
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        logits = self._logits(batch)
        loss = functional.cross_entropy(
            logits, batch.data["labels"], label_smoothing=self._task.smoothing
        )
        self._optimizer.zero_grad()
        loss.backward()
        most = math.inf if config.clip_grad is None else config.clip_grad
        norm = torch.nn.utils.clip_grad_norm_(self._model.net.parameters(), most)
        for parameter in self._model.net.parameters() if self._noise else ():
            assert parameter.grad is not None
            noise = torch.empty_like(parameter.grad).normal_(generator=self._dice)
            parameter.grad.add_(noise * (self._noise * parameter.grad.abs().max()))
        if not skip:
            self._optimizer.step()
        self._consumed += part.global_batch
        end = self._consumed >= self.samples
        self.trained.steps.append(
            Step(self._epoch, float(loss.detach()), float(norm), lr, batch.indices, end)
        )
        if end:
            self._epoch, self._consumed = self._epoch + 1, 0

    def _logits(self, batch: Batch) -> torch.Tensor:
        return self._task.logits(self._model.compute, batch.data["images"])

    def _size(self) -> int:
        """Samples of a whole step here."""
        ramp = ramp_of(self._config.batch_size)
        used = self._epoch * self.samples + self._consumed
        return size_after(used, ramp.most, (ramp.first, ramp.by, ramp.over))

    def _learning_rate(self) -> float:
        """Of the schedule, for a batch that is smaller than it is going to be."""
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self._config.ramp_lr]
        return self._scheduled() * (self._size() / self._config.batch_size) ** power

    def _scheduled(self) -> float:
        """Linear warm-up, then a cosine to ``--min-lr``, over the batches of all epochs."""
        config = self._config
        each = math.ceil(self.samples / config.batch_size)
        total = each * config.epochs
        warmup = min(round(config.warmup_epochs * each), total - 1)
        now = self._epoch * each + self._consumed / config.batch_size
        if now < warmup:
            first = config.lr / (warmup + 1)
            return first + now * (config.lr - first) / warmup
        turn = (now - warmup) / (total - warmup)
        return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * turn)) / 2

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Top-1 and loss of the held-out images."""
        self._model.eval()
        loss = right = count = 0.0
        for batch in self._loader.test_batches(make_plan(1, (1.0,), (10**6,), EXACT)):
            logits = self._logits(batch)
            loss += float(functional.cross_entropy(logits, batch.data["labels"], reduction="sum"))
            right += float((logits.argmax(dim=1) == batch.data["labels"]).sum())
            count += len(batch.data["labels"])
        self._model.train()
        self.trained.evaluations[len(self.trained.steps)] = right / count, loss / count

    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return {name: value.cpu() for name, value in self._model.net.state_dict().items()}


def _hand_over(
    old_net: nn.Module,
    old: torch.optim.Optimizer,
    as_made: list[dict[str, Any]],
    net: nn.Module,
    new: torch.optim.Optimizer,
) -> None:
    """Have an optimizer go on from another one of the same kind, but with options of its own.

    Args:
        as_made: the old one's groups before its first step: what differs since is no option.
    """
    then, now = _order(old_net, old), _order(net, new)
    kept, packed = copy.deepcopy(old.state_dict()), new.state_dict()
    packed["state"] = {now.index(then[place]): state for place, state in kept["state"].items()}
    for group in packed["param_groups"]:
        place = then.index(now[group["params"][0]])
        for before, made in zip(kept["param_groups"], as_made, strict=True):
            if place in before["params"]:
                group |= {key: value for key, value in before.items()
                          if key not in ("params", "lr") and made.get(key) != value}  # fmt: skip
    # What else it keeps, such as Kron's random numbers, goes on.
    new.load_state_dict({**kept, "state": packed["state"], "param_groups": packed["param_groups"]})


def _order(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of an optimizer's parameters, as its state_dict() counts them."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
