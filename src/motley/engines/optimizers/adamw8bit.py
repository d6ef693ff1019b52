"""AdamW whose moments take 8 bits per number, and 32 bits per block: ``--opt adamw8bit``.

Each block of a moment is divided by its largest absolute value. Each number is then rounded to the
nearest of 256 values, which are closer together near zero (T. Dettmers et al., "8-bit Optimizers
via Block-wise Quantization", arXiv:2110.02861). If each row of a parameter is a whole number of
blocks, the blocks and codes are those of torchao.optim.AdamW8bit. Otherwise this implementation
differs as follows:

- A block lies in one row of a parameter. If ranks divide a parameter by rows, blocks stay whole.

- A step consists of separate operations that every device rounds equally (IEEE), without fused
  operations. If a GPU rounded a multiplication and addition once, and a CPU twice, a number might
  get the next code, one percent away. Different devices would diverge in a few steps.

- Nothing is compiled, so no host needs a compiler, and no rank waits for one.

- The second moment is never rounded to zero, because a step would then have no bound. Very small
  gradients, as in models with billions of parameters, therefore have an effect. In torchao no scale
  is below 1e-12, which corresponds to a gradient of 1e-6.

Vectors, such as norms and biases, and matrices of short rows keep moments of 32 bits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from motley.engines.named_state import own_rows, rows_as
from motley.engines.optimizers import Codec, OwnOptimizer

BLOCK = 256  # numbers that share a scale
_SHORTEST = 64  # length of the shortest row in 8 bits; its scale adds a sixteenth
_SCALE = "_scale"  # suffix of a slot with the scales of another slot
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
_LEAST = 1e-30  # least scale, against division by zero
_CELLS, _REST = 1 << 16, 16  # cells of numbers with equal first bits; number of other bits
# Numbers that are stepped at a time. The fp32 values between decoding and encoding take 25 bytes
# per number, and should fit into the cache of a core. A GPU is not faster with more.
_A_CORES, _A_GPUS = 1 << 15, 1 << 22


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments have 8 bits; see this module.

    Steps are computed in fp32, whatever the type of the parameters. The step of a row does not
    depend on the rest of its tensor, unless the tensor is a vector.

    Args:
        params: as in torch.optim.AdamW.
        lr: learning rate, as in torch.optim.AdamW.
        betas: as in torch.optim.AdamW.
        eps: as in torch.optim.AdamW.
        weight_decay: as in torch.optim.AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of AdamW.

        Args:
            closure: function that computes the loss again and returns it, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    slots = self.state[parameter]
                    if not slots:
                        slots.update(_new_slots(parameter))
                    slots["step"] += 1
                    _step(parameter, slots, _Factors(group, int(slots["step"])))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`. The codes stay 8-bit integers.

        The method of torch.optim.Optimizer would convert the codes to the parameter's dtype.
        """
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [each for group in self.param_groups for each in group["params"]]
        for number, slots in state_dict["state"].items():
            device = parameters[number].device
            self.state[parameters[number]] = {
                name: value if name == "step" else value.to(device) for name, value in slots.items()
            }


def is_scale(slot: str) -> bool:
    """Return True if a tensor of the state holds the scales of another tensor's codes."""
    return slot.removesuffix(_SCALE) in _SIGNED and slot.endswith(_SCALE)


def widen(slots: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a parameter's 8-bit moments in 32 bits, by name.

    The dictionary is empty if the moments of the parameter do not have 8 bits.
    """
    return {
        name: unpack(own_rows(slots[name]).flatten(1), own_rows(slots[name + _SCALE]), signed)
        for name, signed in _SIGNED.items()
        if name + _SCALE in slots
    }


def narrow(slots: Mapping[str, Any], wide: Mapping[str, Tensor]) -> None:
    """Write moments of 32 bits into the optimizer's tensors of 8 bits, in place."""
    for name, values in wide.items():
        codes, scale = pack(values, _SIGNED[name])
        own_rows(slots[name]).flatten(1).copy_(codes)
        own_rows(slots[name + _SCALE]).copy_(scale)


def converted(tensors: Mapping[str, Tensor], in_8_bits: bool) -> dict[str, Tensor]:
    """Convert the saved state of AdamW to that of AdamW8bit or back.

    Args:
        tensors: tensors by name, including ``optimizer.<parameter>.<slot>``.
        in_8_bits: True: convert moments to 8 bits. False: convert them to 32 bits.
    """
    result = dict(tensors)
    for key, value in tensors.items():
        kind, slot = key.partition(".")[0], key.rpartition(".")[2]
        if kind != "optimizer" or slot not in _SIGNED:
            continue
        own, scale = own_rows(value), tensors.get(key + _SCALE)
        made: dict[str, Tensor] = {}
        if in_8_bits and scale is None and is_packed(value.shape):
            codes, scale = pack(own.float().flatten(1), _SIGNED[slot])
            made = {key: codes.view(own.shape), key + _SCALE: scale}
        elif not in_8_bits and scale is not None:
            del result[key + _SCALE]
            made = {key: unpack(own.flatten(1), own_rows(scale), _SIGNED[slot]).view(own.shape)}
        for each, part in made.items():
            result[each] = rows_as(part, value) if isinstance(value, DTensor) else part
    return result


class _Factors:
    """The scalar factors of a step. Python computes them, so that they are equal on all devices."""

    def __init__(self, group: Mapping[str, Any], step: int) -> None:
        self.beta1, self.beta2 = group["betas"]
        rate = float(group["lr"])
        self.keep = 1 - rate * group["weight_decay"]
        self.rate = rate / (1 - self.beta1**step)
        self.root = 1 / math.sqrt(1 - self.beta2**step)
        self.eps = group["eps"]


def _new_slots(parameter: Tensor) -> dict[str, Tensor]:
    own = own_rows(parameter)
    slots = {"step": torch.zeros(())}
    for name in _SIGNED:
        if not is_packed(own.shape):
            slots[name] = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
            continue
        slots[name] = torch.zeros(own.shape, dtype=torch.uint8, device=own.device)
        shape = (len(own), -(-math.prod(own.shape[1:]) // BLOCK))
        slots[name + _SCALE] = torch.zeros(shape, device=own.device)
    if isinstance(parameter, DTensor):
        result = {name: rows_as(value, parameter) for name, value in slots.items() if value.ndim}
        slots |= result
    return slots


def is_packed(shape: torch.Size) -> bool:
    """Return True if moments of a parameter of this shape have 8 bits.

    The result is the same for the whole parameter and for any number of its rows.
    """
    return len(shape) > 1 and math.prod(shape[1:]) >= _SHORTEST


def _step(parameter: Tensor, slots: Mapping[str, Tensor], factors: _Factors) -> None:
    whole, grad = own_rows(parameter.detach()), own_rows(parameter.grad)  # type: ignore[arg-type]
    if not whole.numel():
        return
    moments = [own_rows(slots[name]) for name in _SIGNED]
    if moments[0].dtype != torch.uint8:
        _advance(whole, grad, factors, *moments)
        return
    scales = [own_rows(slots[name + _SCALE]) for name in _SIGNED]
    values = whole.contiguous().flatten(1)  # a view, unless the memory order is another one
    grads, codes = grad.flatten(1), [each.flatten(1) for each in moments]
    most = _A_CORES * torch.get_num_threads() if whole.device.type == "cpu" else _A_GPUS
    count = max(1, most // values.shape[1])
    for first in range(0, len(values), count):
        rows = slice(first, first + count)
        wide = [
            unpack(code[rows], scale[rows], signed)
            for code, scale, signed in zip(codes, scales, _SIGNED.values(), strict=True)
        ]
        _advance(values[rows], grads[rows], factors, *wide)
        for code, scale, each, signed in zip(codes, scales, wide, _SIGNED.values(), strict=True):
            code[rows], scale[rows] = pack(each, signed)
    if not whole.is_contiguous():
        whole.copy_(values.view(whole.shape))


def _advance(values: Tensor, grad: Tensor, factors: _Factors, mean: Tensor, square: Tensor) -> None:
    """Take one AdamW step, in place.

    Every operation of this function rounds in the same way on all devices. Fused operations (lerp,
    addcmul, addcdiv, add with alpha) are avoided, because they round once on one device and twice
    on another. Division by a scalar is avoided, because a GPU multiplies by the inverse.
    """
    grad = grad.float()
    mean.mul_(factors.beta1).add_(grad * (1 - factors.beta1))
    square.mul_(factors.beta2).add_((grad * grad).mul_(1 - factors.beta2))
    step = _root(square).mul_(factors.root).add_(factors.eps)
    torch.div(mean * factors.rate, step, out=step)
    values.mul_(factors.keep).sub_(step)


def _root(values: Tensor) -> Tensor:
    """Return the correctly rounded square root, in new memory.

    On a CPU, torch uses MKL's square root. MKL returns a neighbouring number for 0.7 % of the
    inputs on Intel's processors, and for 17 % on AMD's. A root in fp64 is exact enough: its
    distance to a rounding boundary of fp32 is larger than its error.
    """
    if values.is_cuda and torch.version.hip is None:
        return values.sqrt()
    return values.double().sqrt_().float()


def pack(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales that represent values.

    The codes are uint8 [rows, numbers], and the scales fp32 [rows, blocks].

    Args:
        values: the values, fp32 [rows, numbers].
        signed: True if values may be negative.
    """
    rows, numbers = values.shape
    blocks = -(-numbers // BLOCK)
    if fill := blocks * BLOCK - numbers:
        values = torch.nn.functional.pad(values, (0, fill))
    values = values.view(rows, blocks, BLOCK)
    scale = values.abs().amax(dim=2).clamp_(min=_LEAST)
    scaled = (values / scale.unsqueeze(2)).flatten()
    tables = _tables(signed, str(values.device))
    cell = (scaled.view(torch.int32) >> _REST).add_(_CELLS // 2)
    codes = tables.lowest.index_select(0, cell)
    codes += scaled >= tables.edge.index_select(0, cell)
    return codes.view(rows, -1)[:, :numbers], scale


def unpack(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Return the values that codes and scales represent, fp32 [rows, numbers], in new memory."""
    numbers = _tables(signed, str(codes.device)).numbers
    result = numbers.index_select(0, codes.int().flatten()).view(codes.shape)
    blocks, last = divmod(codes.shape[1], BLOCK)
    whole = blocks * BLOCK
    if blocks:
        result[:, :whole].view(-1, blocks, BLOCK).mul_(scale[:, :blocks].unsqueeze(2))
    if last:
        result[:, whole:].mul_(scale[:, blocks:])
    return result


@dataclass(frozen=True)
class _Tables:
    """Tables that map codes to values, and the first 16 bits of a value to its nearest code.

    For given 16 bits, at most two codes are possible, and one comparison decides between them. A
    binary search takes a CPU ten times as long.

    Attributes:
        numbers: value of each code, fp32 [256], ascending.
        lowest: for each pattern of the first 16 bits, the nearest code of the lowest value with
            this pattern, uint8 [cells].
        edge: for each pattern of the first 16 bits, the value above which the next code is nearer,
            fp32 [cells].
    """

    numbers: Tensor
    lowest: Tensor
    edge: Tensor


@cache
def _tables(signed: bool, device: str) -> _Tables:
    """Return the tables of codes, computed by Python, so that they are equal on all hosts.

    The values cover seven decades. Each decade has twice as many codes as the decade below it, at
    the midpoints of equal intervals. For signed values, each sign has half as many codes. Zero and
    one are additional codes.
    """
    result = [0.0, 1.0]
    for decade in range(7):
        parts = 2 ** (decade + (not signed))
        middles = [(0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (decade - 6)
                   for part in range(parts)]  # fmt: skip
        result += middles + [-each for each in middles] * signed
    result.sort()
    between = torch.tensor([(one + other) / 2 for one, other in pairwise(result)] + [math.inf])
    cells = torch.arange(-_CELLS // 2, _CELLS // 2, dtype=torch.int32) << _REST
    cells[: _CELLS // 2] |= (1 << _REST) - 1  # for negative numbers, larger bits mean lower values
    lowest = torch.bucketize(cells.view(torch.float32), between, right=True)
    lowest.clamp_(0 if signed else 1, len(result) - 1)
    return _Tables(
        torch.tensor(result, device=device), lowest.to(device, torch.uint8),
        between[lowest].to(device),
    )  # fmt: skip


OPTIMIZERS = (
    OwnOptimizer(
        "adamw8bit", "AdamW whose moments take 8 bits a number", AdamW8bit, has_betas=True,
        row=BLOCK, like="adamw",
        codec=Codec(
            is_scale, widen, narrow, partial(converted, in_8_bits=True),
            partial(converted, in_8_bits=False),
        ),
    ),
)  # fmt: skip
