"""Batch norm over fixed groups of the global order ("ghost batch norm"): exact on any machines.

A plain batch norm takes its statistics over whatever a rank has in a micro-batch, so that a
sample's loss depends on how the batch is cut. Here they are of g consecutive samples of the global
order, the task's grain, which stay together in one micro-batch: a sample's loss depends on its
group alone. The running statistics, which evaluation takes, move once a step towards the mean over
all groups of the global batch:

    r <- (1 - m) r + m (1/N) sum over groups of size * (mean, unbiased variance)

This is linear, so that a rank keeps its own part of it, and the parts are added where parameters
are united. A pass *writes* what it has seen, so that one that is computed again (checkpointing)
counts once; it is taken after the backward pass, and dropped with a step that is not taken.

Source of the name: Hoffer, Hubara and Soudry, "Train longer, generalize better", 2017.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from motley.data.import_timm import timm
from motley.errors import MotleyError

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, timm.layers.BatchNormAct2d)


def batch_norms(net: nn.Module) -> dict[str, _BatchNorm]:
    """Layers by path whose statistics training takes of the batch; not those that are frozen.

    Raises:
        MotleyError: of a kind whose groups cannot be fixed.
    """
    found = {}
    for path, part in net.named_modules():
        if not isinstance(part, _BatchNorm) or is_frozen(part):
            continue
        if type(part) not in _KINDS:
            raise MotleyError(
                f"{path} is a {type(part).__name__}, whose statistics are of all that a rank has, "
                "which unequal shares make differ; use nn.BatchNorm1d, 2d or 3d, or layer norm"
            )
        found[path] = part
    return found


def is_frozen(part: nn.Module) -> bool:
    """It has parameters, and none is trained: then its running statistics stay too."""
    own = list(part.parameters(recurse=False))
    return bool(own) and not any(parameter.requires_grad for parameter in own)


def keep_frozen(net: nn.Module) -> None:
    """Have frozen batch norms take their running statistics, in training too."""
    for part in net.modules():
        if isinstance(part, _BatchNorm) and is_frozen(part):
            part.train = MethodType(_never_train, part)  # type: ignore[method-assign]
            part.eval()


class GroupStatistics:
    """What the batch norms of a model have seen on this rank since parameters were united.

    Args:
        net: its batch norms are changed to take statistics over groups.
        grain: samples of a group.
    """

    def __init__(self, net: nn.Module, grain: int) -> None:
        layers = list(batch_norms(net).values())
        self._layers = [layer for layer in layers if layer.running_mean is not None]
        sizes = [2 * layer.num_features for layer in self._layers]
        like = next(net.parameters())
        zeros = partial(torch.zeros, sum(sizes), device=like.device, dtype=like.dtype)
        # Of all layers one behind the other, each [mean, unbiased variance] of its channels.
        self._seen, self._step, self._own = zeros(), zeros(), zeros()
        self._share = zeros()  # of what r moves by, that is this rank's
        self._moves = zeros()  # what r moves by, through all ranks
        self._samples, self._global, self._steps = 0, 1, 0
        kept = dict(zip(map(id, self._layers), self._split(self._seen), strict=True))
        for layer in layers:
            change = partial(_forward, layer, _own_forward(layer), grain, kept.get(id(layer)))
            layer.forward = change  # type: ignore[method-assign]

    def _split(self, numbers: Tensor) -> list[Tensor]:
        """Of each layer, [2, C]; views."""
        sizes = [2 * layer.num_features for layer in self._layers]
        return [part.view(2, -1) for part in torch.split(numbers, sizes)]

    def take(self, samples: int, n_global: int) -> None:
        """Count the last pass, after its backward pass.

        Args:
            samples: of the pass. n_global: of the global batch.
        """
        if samples and self._layers:
            self._step.add_(self._seen)
            self._samples += samples
            self._global = n_global

    def end_step(self, taken: bool) -> None:
        """Count the passes of a step; or none of them, where it was not taken."""
        if taken and self._layers:
            momentum = self._momentum()
            part = momentum * (self._samples / self._global)
            self._own = (1 - momentum) * self._own + momentum * self._step / self._global
            self._share = (1 - momentum) * self._share + part
            self._moves = (1 - momentum) * self._moves + momentum
            self._steps += 1
        self._step.zero_()
        self._samples = 0

    def _momentum(self) -> Tensor:
        """m of each number; with ``momentum=None`` all steps count alike."""
        each = [
            1 / (int(layer.num_batches_tracked) + self._steps + 1)  # type: ignore[arg-type]
            if layer.momentum is None else layer.momentum
            for layer in self._layers
        ]  # fmt: skip
        if len(set(each)) == 1:
            return torch.full_like(self._seen[:1], each[0])
        return torch.cat([
            self._seen.new_full((2 * layer.num_features,), m)
            for layer, m in zip(self._layers, each, strict=True)
        ])  # fmt: skip

    def unite(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Add up what all ranks have seen, into the layers' buffers; all ranks call it.

        Args:
            on_change: called before they change.
        """
        if not self._layers:
            return
        told = torch.cat([self._own, self._share, self._own.new_tensor([float(self._steps)])])
        dist.all_reduce(told)
        on_change()
        own, share = told[:-1].chunk(2)
        steps = round(float(told[-1]) / dist.get_world_size())
        parts = zip(self._layers, self._split(own), self._split(share), strict=True)
        for layer, moved, moves in parts:
            assert layer.running_mean is not None and layer.running_var is not None
            for place, running in enumerate((layer.running_mean, layer.running_var)):
                running.copy_((1 - moves[place]) * running + moved[place])
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked += steps
        self.forget()

    def state(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """What this rank has seen since parameters were united, as ``keep`` takes it."""
        seen = {"own": self._own, "share": self._share, "moves": self._moves}
        return {name: keep(value) for name, value in seen.items()} | {
            "steps": torch.tensor(self._steps)
        }

    def go_on(self, state: Mapping[str, Tensor]) -> None:
        """Add up what those who are left have seen, whose samples stand for those of the others
        too; all of them call it, each with its :meth:`state`, or without if the buffers have it."""
        if state:
            self._own, self._share, self._moves = (
                state[name].to(self._own) for name in ("own", "share", "moves")
            )
            self._steps = int(state["steps"])
        if not self._layers:
            return
        shares = self._share.clone()
        dist.all_reduce(shares)
        more = torch.where(shares > 0, self._moves / shares, shares)
        self._own, self._share = self._own * more, self._share * more
        self.unite()

    def forget(self) -> None:
        """Begin anew, from the layers' buffers."""
        for tensor in (self._step, self._own, self._share, self._moves):
            tensor.zero_()
        self._samples, self._steps = 0, 0


def _never_train(part: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(part, False)


def _own_forward(layer: _BatchNorm) -> Any:
    """Its forward, as it was before this file changed it."""
    changed: Any = layer.forward
    ours = isinstance(changed, partial) and changed.func is _forward
    return changed.args[1] if ours else changed


def _forward(
    layer: _BatchNorm, own: Callable[[Tensor], Tensor], grain: int, seen: Tensor | None, x: Tensor
) -> Tensor:
    """What the layer does; in training over groups.

    Args:
        own: its forward. seen: [2, C], where the statistics go, if it keeps any.
        x: [n, C, ...], of n / grain groups, interleaved; or of one group of another size.
    """
    if not layer.training:
        return own(x)
    y = _by_group(layer, grain, seen, x)
    if isinstance(layer, timm.layers.BatchNormAct2d):
        y = layer.act(layer.drop(y))
    return y


def _by_group(layer: _BatchNorm, grain: int, seen: Tensor | None, x: Tensor) -> Tensor:
    n, channels = x.shape[:2]
    groups = n // grain if n % grain == 0 else 1
    each = n // groups
    like = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean = torch.zeros(groups * channels, device=x.device, dtype=like)
    variance = torch.zeros_like(mean)
    weight, bias = (value if value is None else value.repeat(groups)
                    for value in (layer.weight, layer.bias))  # fmt: skip
    # torch.batch_norm, since functional.batch_norm refuses a channel of one value.
    y: Any = torch.batch_norm(
        x.reshape(each, groups * channels, *x.shape[2:]), weight, bias, mean, variance,
        True, 1.0, layer.eps, torch.backends.cudnn.enabled,
    )  # fmt: skip
    if seen is not None:
        with torch.no_grad():
            # Of one value there is no unbiased variance: NaN would stay for ever.
            if x.numel() == n * channels and each == 1:
                variance = torch.zeros_like(variance)
            sums = torch.stack([mean, variance]).view(2, groups, channels).sum(dim=1)
            seen.copy_(each * sums)
    # No view for autograd: what changes a view in place, as ResNets' ReLU does, has the backward
    # pass copy the whole. Nobody else has y, which is not kept for its own backward pass.
    shaped: Tensor = torch.ops.aten._unsafe_view(y, x.shape)
    return shaped
