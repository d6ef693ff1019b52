"""What a case should come to: one process, whole batches, no wrapper, no history but the user's.

Only the data (which samples, how they look) and the optimizer are Motley's; the step, the schedule,
the average of the parameters and the count of samples are written again here, in as few lines as
they take. Batch norms are torch's own: the model computes each group of samples by itself, and the
running statistics move towards the mean over all groups.
"""

import copy
import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
from fuzz.cases import size_after
from sklearn.metrics import f1_score  # type: ignore[import-untyped]
from timm.loss import JsdCrossEntropy
from timm.utils import dispatch_clip_grad
from torch import nn
from torch.nn import functional

from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.data.loader import Loader
from motley.data.source import Batch, Order
from motley.engines.optimizer import make_optimizer
from motley.plan.length import make_ramp
from motley.plan.plan import make_plan
from motley.tasks.builtin import get_task
from motley.tasks.net import build_net


def clip(trained: list[torch.nn.Parameter], most: float, mode: str) -> None:
    """Clip gradients as timm does.

    torch's function does not take complex numbers, so their parts are clipped here.
    """
    if mode != "value":
        dispatch_clip_grad(trained, most, mode)
        return
    for grad in (each.grad for each in trained if each.grad is not None):
        (torch.view_as_real(grad) if grad.is_complex() else grad).clamp_(-most, most)


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
    evaluations: dict[int, tuple[float, float, float]] = field(default_factory=dict)


class OneValue(nn.BatchNorm1d):
    """Torch's batch norm, which also takes a last group of one value a channel: that is its own
    mean, and varies by nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, C, ...] to the same."""
        if not self.training or x.numel() > x.shape[1]:
            return super().forward(x)
        assert self.momentum and self.running_mean is not None and self.running_var is not None
        with torch.no_grad():
            self.running_mean.lerp_(x.flatten(), self.momentum)
            self.running_var.mul_(1 - self.momentum)
            self.num_batches_tracked += 1
        return (x - x) * self.weight + self.bias


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
        self._config, self._task = config, get_task(config)
        old = getattr(self, "_net", None)
        net = in_type(build_net(self._task, config), self._dtype).to(self._device)
        if old is not None:
            net.load_state_dict(old.state_dict())
        for part in net.modules():
            if type(part) is nn.BatchNorm1d:
                part.__class__ = OneValue
        self._net = net.train()
        optimizer = make_optimizer(net, config)
        as_made = copy.deepcopy(optimizer.state_dict()["param_groups"])
        if old is not None:
            _hand_over(old, self._optimizer, self._as_made, net, optimizer)
        else:
            self.average = self._parameters()
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
        model, optimizer, self.average, self._epoch, self._consumed = self._states[step]
        self._net.load_state_dict(model)
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
                copy.deepcopy(self._net.state_dict()), copy.deepcopy(self._optimizer.state_dict()),
                self.average, self._epoch, self._consumed,
            ))  # fmt: skip
            self._step(step in skipped)
            every = config.eval_every
            if self.trained.steps[-1].end if every is None else (step + 1) % int(every) == 0:
                self._evaluate()
        if len(self.trained.steps) not in self.trained.evaluations:
            self._evaluate()
        return self.trained

    def _step(self, skip: bool) -> None:
        config, plan = self._config, make_plan(self._size(), (1.0,), (10**6,), EXACT)
        lr = self._learning_rate()
        part, micro = next(iter(self._loader.steps(self._epoch, self._consumed, plan)))
        ((batch, _),) = micro
        for group, made in zip(self._optimizer.param_groups, self._as_made, strict=True):
            group["lr"] = lr
            if config.weight_decay_end is not None:
                decays = made["weight_decay"] > 0
                group["weight_decay"] = self._weight_decay() if decays else 0.0
        self._optimizer.zero_grad()
        before = copy.deepcopy(dict(self._net.named_buffers()))
        loss = self._pass(batch, before)
        most = math.inf if config.clip_grad is None else config.clip_grad
        trained = [each for each in self._net.parameters() if each.grad is not None]
        norm = torch.nn.utils.get_total_norm([each.grad for each in trained])
        if config.clip_grad is not None:
            clip(trained, most, config.clip_mode)
        for parameter in trained if self._noise else ():
            noise = torch.empty_like(parameter.grad).normal_(generator=self._dice)
            parameter.grad.add_(noise * (self._noise * parameter.grad.abs().max()))
        if skip:
            self._set_buffers(before)
        else:
            self._optimizer.step()
            if config.model_ema:
                weight = 1 - config.model_ema_decay
                self.average = {name: torch.lerp(self.average[name], value, weight)
                                for name, value in self._parameters().items()}  # fmt: skip
        self._consumed += part.global_batch
        end = self._consumed >= self.samples
        self.trained.steps.append(Step(self._epoch, loss, float(norm), lr, batch.indices, end))
        if end:
            self._epoch, self._consumed = self._epoch + 1, 0

    def _pass(self, batch: Batch, before: dict[str, torch.Tensor]) -> float:
        """Forward and backward pass of a step; returns the loss.

        Args:
            before: the buffers, from which each group begins.
        """
        size, each = len(batch.indices), self._task.grain if before else len(batch.indices)
        weight, total = None, float(size)
        if self._task.class_weights:
            numbers = [float(each) for each in self._task.class_weights.split(",")]
            weight = torch.tensor(numbers, dtype=self._dtype, device=self._device)
            total = float(weight.cpu().double()[batch.data["labels"].cpu()].sum())
        loss, after = 0.0, {name: torch.zeros_like(value) for name, value in before.items()}
        for start in range(0, size, each):
            group = slice(start, min(size, start + each))
            self._set_buffers(before)
            images, labels = (batch.data[name][group] for name in ("images", "labels"))
            part = self._loss(images, labels, weight) / total
            part.backward()
            loss += float(part.detach())
            for name, value in self._net.named_buffers():
                if value.is_floating_point():
                    after[name] += (group.stop - start) / size * value
                else:
                    after[name] = value.clone()
        self._set_buffers(after)
        return loss

    def _loss(
        self, images: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of the losses; the images of a sample are one, or several."""
        usual = partial(
            functional.cross_entropy, weight=weight, label_smoothing=self._task.smoothing,
            reduction="sum",
        )  # fmt: skip
        if images.dim() < 5:
            return usual(self._logits(images), labels)
        count = images.shape[1]
        outputs = self._logits(images.flatten(0, 1)).unflatten(0, (len(labels), count))
        parts = outputs.transpose(0, 1).flatten(0, 1), labels.repeat(count)  # as timm has them
        if not self._task.jsd_loss:
            return usual(*parts) / count
        of_timm = JsdCrossEntropy(num_splits=count, smoothing=self._task.smoothing)
        mean: torch.Tensor = of_timm(*parts)
        return mean * len(labels)

    @torch.no_grad()
    def _set_buffers(self, values: dict[str, torch.Tensor]) -> None:
        for name, buffer in self._net.named_buffers():
            buffer.copy_(values[name])

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in self._net.named_parameters()}

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        return self._task.logits(lambda pixels: self._net(pixels.to(self._dtype)), images)

    @torch.no_grad()
    def outputs(self, pixels: torch.Tensor, averaged: bool) -> torch.Tensor:
        """Return what the network makes of normalised images, as in an evaluation.

        Args:
            averaged: with the average in place of the parameters.
        """
        net = copy.deepcopy(self._net).eval()
        for name, parameter in net.named_parameters() if averaged else ():
            parameter.copy_(self.average[name])
        made: torch.Tensor = net(pixels.to(self._dtype))
        return made

    def _size(self) -> int:
        """Samples of a whole step here."""
        ramp = make_ramp(self._config.batch_size)
        used = self._epoch * self.samples + self._consumed
        return size_after(used, ramp.most, (ramp.first, ramp.by, ramp.over))

    def _learning_rate(self) -> float:
        """Of the schedule, for a batch that is smaller than it is going to be."""
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self._config.ramp_lr]
        size = self._size() / self._config.batch_size
        return self._scheduled() * self._rate_noise() * size**power

    def _rate_noise(self) -> float:
        """By timm's own schedule, in epochs."""
        config = self._config
        if not config.lr_noise:
            return 1.0
        bounds = [part * config.epochs for part in (*config.lr_noise, math.inf)[:2]]
        of_timm = timm.scheduler.CosineLRScheduler(
            torch.optim.SGD([torch.zeros(1)]), config.epochs, noise_range_t=bounds,
            noise_pct=config.lr_noise_pct, noise_seed=config.seed,
        )  # fmt: skip
        applies = of_timm._is_apply_noise(self._epoch)
        return 1.0 + (of_timm._calculate_noise(self._epoch) if applies else 0.0)

    def _scheduled(self) -> float:
        """Linear warm-up, then a cosine to ``--min-lr``, over the batches of all epochs."""
        config = self._config
        each = math.ceil(self.samples / config.batch_size)
        total = each * config.epochs
        warmup = min(round(config.warmup_epochs * each), total - 1)
        if config.warmup_steps is not None:
            warmup = min(config.warmup_steps, total - 1)
        now = self._epoch * each + self._consumed / config.batch_size
        if now < warmup:
            first = config.lr / (warmup + 1) if config.warmup_lr is None else config.warmup_lr
            return first + now * (config.lr - first) / warmup
        steps, count = total - warmup, config.lr_cycle_limit
        ends = sorted({max(1, round(steps * (n + 1) / count)) for n in range(count)} | {steps})
        ends = [end for end in ends if end <= steps]
        cycle = min(sum(now - warmup >= end for end in ends), len(ends) - 1)
        begin = ([0, *ends])[cycle]
        turn, top = (now - warmup - begin) / (ends[cycle] - begin), config.lr * 0.5**cycle
        return float(config.min_lr + (top - config.min_lr) * (1 + math.cos(math.pi * turn)) / 2)

    def _weight_decay(self) -> float:
        """Half a cosine, from the first to the last step of all epochs."""
        config, each = self._config, math.ceil(self.samples / self._config.batch_size)
        now = self._epoch * each + self._consumed / config.batch_size
        part = min(1.0, now / max(1, each * config.epochs - 1))
        end = float(config.weight_decay_end or 0.0)
        return end + (config.weight_decay - end) * (1 + math.cos(math.pi * part)) / 2

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Top-1, loss and F1 of the held-out images."""
        self._net.eval()
        loss = 0.0
        pairs = list[tuple[int, int]]()
        for batch in self._loader.test_batches(make_plan(1, (1.0,), (10**6,), EXACT)):
            logits = self._logits(batch.data["images"])
            loss += float(functional.cross_entropy(logits, batch.data["labels"], reduction="sum"))
            predicted, labels = logits.argmax(dim=1).tolist(), batch.data["labels"].tolist()
            pairs += zip(labels, predicted, strict=True)
        self._net.train()
        labels, predicted = zip(*pairs, strict=True)
        right, count = sum(label == said for label, said in pairs), len(pairs)
        f1 = float(f1_score(labels, predicted, average="macro"))
        self.trained.evaluations[len(self.trained.steps)] = right / count, loss / count, f1

    @property
    def keeps_16_bits(self) -> bool:
        """The optimizer rounds some of its state to 16 bits, as Big Vision's Adafactor does."""
        return any(
            isinstance(each, torch.Tensor) and each.dtype in (torch.bfloat16, torch.float16)
            for slots in self._optimizer.state.values() for each in slots.values()
        )  # fmt: skip

    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return {name: value.cpu() for name, value in self._net.state_dict().items()}


def in_type(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a network whose numbers of 32 bits, real and complex, are of this type."""
    if dtype == torch.float32:
        return net
    kinds = {torch.float32: dtype, torch.complex64: torch.complex128}
    return net._apply(lambda tensor: tensor.to(kinds.get(tensor.dtype, tensor.dtype)))


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
