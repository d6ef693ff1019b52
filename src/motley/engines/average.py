"""An exponential moving average of the parameters, beside those that are trained:

    average <- d * average + (1 - d) * parameters    after each step that was taken.

Parameters alone are averaged, as torch.optim.swa_utils does: the running statistics of batch norms
are averages already. Source of the decay d and its warm-up: timm.utils.ModelEmaV3.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Named = Mapping[str, Any]  # a Tensor by name; DTensors are theirs too


def trained(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, each once, by name."""
    return {name: each for name, each in net.named_parameters() if each.requires_grad}


class ParameterAverage:
    """Of what this rank holds of each parameter, the whole or a part.

    Args:
        held: the tensors that the optimizer changes, by the names of their parameters.
        decay: d. warmup: less of it at first, 1 - (1 + step) ^ (-2/3).

    Attributes:
        tensors: the average, by name.
        numbers: ``updates``, steps that are in it, int64 [].
        exchanged: it is in the parameters' place now.
    """

    def __init__(self, held: Callable[[], Named], decay: float, warmup: bool) -> None:
        self._held, self._decay, self._warmup = held, decay, warmup
        self.exchanged = False
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin with the parameters as they are now."""
        self.tensors = {name: each.detach().clone() for name, each in self._held().items()}
        self.numbers = {"updates": torch.zeros((), dtype=torch.int64)}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now, after a step."""
        self.numbers["updates"] += 1
        decay, updates = self._decay, int(self.numbers["updates"])
        if self._warmup:
            decay = min(decay, 1 - (1 + updates) ** (-2 / 3))
        held = self._held()
        torch._foreach_lerp_(
            list(self.tensors.values()), [held[name].detach() for name in self.tensors], 1 - decay
        )

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the average in the parameters' place, and them in its; twice, and all is as it was,
        to the bit."""
        for name, parameter in self._held().items():
            average = self.tensors[name]
            before = average.clone()
            average.copy_(parameter)
            parameter.copy_(before)
        self.exchanged = not self.exchanged

    def put_back(self, state: dict[str, Tensor]) -> None:
        """Have ``model.<name>`` and ``ema.<name>`` change places in a state that was taken while
        they are exchanged."""
        for name in self.tensors:
            model, ema = f"model.{name}", f"ema.{name}"
            state[model], state[ema] = state[ema], state[model]

    def state(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """``ema.<name>``, and ``ema_numbers.updates``; all ranks must call it.

        Args:
            keep: what to take of each tensor.
        """
        return _prefixed("ema", self.tensors, keep) | _prefixed("ema_numbers", self.numbers, keep)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state`, cut as this rank holds it; where that has no average, from
        the parameters."""
        self.begin()
        for prefix, own in (("ema", self.tensors), ("ema_numbers", self.numbers)):
            for name, tensor in own.items():
                if (saved := tensors.get(f"{prefix}.{name}")) is not None:
                    tensor.copy_(saved)


def _prefixed(prefix: str, tensors: Named, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": keep(tensor) for name, tensor in tensors.items()}
