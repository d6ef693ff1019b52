"""Optimizers beside timm's: a file here adds one by listing it under ``OPTIMIZERS``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from motley.registry import entries

_WRAPPER = "lookahead_"  # begins --opt where Lookahead wraps the optimizer


@dataclass(frozen=True)
class Codec:
    """The form in which an optimizer keeps slots of fewer bits, and the way to 32 bits and back.

    Attributes:
        is_extra: return True if a slot is part of another one's form, such as its scale.
        widen: return the slots of one parameter that are in the form, in 32 bits, by name.
        narrow: write slots in 32 bits back into the slots of one parameter.
        encode: return a checkpoint's tensors with ``optimizer.<parameter>.<slot>`` in the form.
        decode: return them in 32 bits.
    """

    is_extra: Callable[[str], bool]
    widen: Callable[[Mapping[str, Any]], dict[str, Tensor]]
    narrow: Callable[[Mapping[str, Any], Mapping[str, Tensor]], None]
    encode: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    decode: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class OwnOptimizer:
    """An optimizer and the form of its state.

    Attributes:
        name: as ``--opt`` takes it. says: one line about it.
        kind: its class, which takes ``lr`` and ``weight_decay``, as timm's do.
        has_betas: the class takes ``betas`` too.
        row: numbers in a row of the matrices that it is tried on. Above 1 it steps each row of a
            parameter alone and needs whole rows; 1: it may be given flat parts.
        codec: of its slots; None: they are tensors like the parameter.
        like: another ``--opt``. Each continues the other's checkpoints.
    """

    name: str
    says: str
    kind: type[torch.optim.Optimizer]
    has_betas: bool = False
    row: int = 1
    codec: Codec | None = None
    like: str = ""


@cache
def own_optimizers() -> tuple[OwnOptimizer, ...]:
    """Return all entries of the registry."""
    return tuple(entries("motley.engines.optimizers", "OPTIMIZERS"))


def find_own(opt: str) -> OwnOptimizer | None:
    """Return the entry for ``--opt``, or for what it wraps; None for timm's own optimizers."""
    name = opt.lower().removeprefix(_WRAPPER)
    return next((each for each in own_optimizers() if each.name == name), None)


def find_row(opt: str) -> int:
    """Return how many numbers make a row that ``--opt`` steps as a whole.

    1: the optimizer may be given flat parts of parameters.
    """
    own = find_own(opt)
    return own.row if own else 1


def are_convertible(opt: str | None, other: str) -> bool:
    """Return True if each of two different ``--opt`` continues the other's checkpoints."""
    return any({opt, other} == {each.name, each.like} for each in own_optimizers())


def convert(tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a checkpoint's tensors in the form that an optimizer keeps.

    Args:
        tensors: tensors by name, ``optimizer.<parameter>.<slot>`` among them.
        optimizer: the optimizer that will load them.
    """
    for own in own_optimizers():
        if own.codec and isinstance(optimizer, own.kind):
            return own.codec.encode(tensors)
        if own.codec and own.like:
            from motley.data.import_timm import timm  # 2 s, which a reader of files need not wait

            like = timm.optim.get_optimizer_class(own.like, bind_defaults=False)
            tensors = own.codec.decode(tensors) if type(optimizer) is like else tensors
    return tensors


def decode(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with all slots in 32 bits."""
    for own in own_optimizers():
        if own.codec:
            tensors = own.codec.decode(tensors)
    return tensors
