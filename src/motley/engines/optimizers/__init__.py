"""Optimizers that Motley adds to those of timm.

A module in this package adds optimizers by listing them in ``OPTIMIZERS``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from motley.registry import entries

_WRAPPER = "lookahead_"  # prefix of --opt if Lookahead wraps the optimizer


@dataclass(frozen=True)
class Codec:
    """The conversion of an optimizer's compressed state tensors (slots) to and from 32 bits.

    Attributes:
        is_extra: function that returns True if a slot only completes another slot. An example is
            the scale of compressed values.
        widen: function that returns the compressed slots of one parameter in 32 bits, by name.
        narrow: function that writes slots in 32 bits back into the slots of one parameter.
        encode: function that returns a checkpoint's tensors with the slots
            ``optimizer.<parameter>.<slot>`` compressed.
        decode: function that returns a checkpoint's tensors with all slots in 32 bits.
    """

    is_extra: Callable[[str], bool]
    widen: Callable[[Mapping[str, Any]], dict[str, Tensor]]
    narrow: Callable[[Mapping[str, Any], Mapping[str, Tensor]], None]
    encode: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    decode: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class OwnOptimizer:
    """An optimizer and the format of its state.

    Attributes:
        name: value of ``--opt`` that selects the optimizer.
        says: one line about the optimizer.
        kind: class of the optimizer. Its constructor takes ``lr`` and ``weight_decay``, as timm's
            classes do.
        has_betas: True if the constructor takes ``betas`` too.
        row: 1: the optimizer may get flat parts of parameters. Above 1: the optimizer needs whole
            rows, because it steps each row of a parameter separately. Trials use rows of this
            length.
        codec: conversion of compressed state tensors; None: no state tensor is compressed.
        like: another value of ``--opt``. Each of the two optimizers can continue from the other's
            checkpoints.
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
    """Return all optimizers that modules of this package list."""
    return tuple(
        entries(
            __name__, "OPTIMIZERS", lambda item: isinstance(item, OwnOptimizer),
            "OwnOptimizer(...)", "adamw8bit",
        )
    )  # fmt: skip


def find_own(opt: str) -> OwnOptimizer | None:
    """Return this package's entry for a value of ``--opt``. None: the optimizer is one of timm's.

    For an optimizer that wraps another one, return the entry of the wrapped optimizer.
    """
    name = opt.lower().removeprefix(_WRAPPER)
    return next((each for each in own_optimizers() if each.name == name), None)


def find_row(opt: str) -> int:
    """Return the length of a row in trials if ``--opt`` needs whole rows, else 1.

    The value 1 means that the optimizer also accepts flat parts of parameters.
    """
    own = find_own(opt)
    return own.row if own else 1


def are_convertible(opt: str | None, other: str) -> bool:
    """Return True if two different optimizers can continue from each other's checkpoints."""
    return any({opt, other} == {each.name, each.like} for each in own_optimizers())


def convert(tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a checkpoint's tensors in the format of an optimizer.

    Args:
        tensors: tensors by name, including ``optimizer.<parameter>.<slot>``.
        optimizer: the optimizer that will load them.
    """
    for own in own_optimizers():
        if own.codec and isinstance(optimizer, own.kind):
            return own.codec.encode(tensors)
        if own.codec and own.like:
            from motley.data.import_timm import timm  # the import takes 2 s

            like = timm.optim.get_optimizer_class(own.like, bind_defaults=False)
            tensors = own.codec.decode(tensors) if type(optimizer) is like else tensors
    return tensors


def decode(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with all slots in 32 bits."""
    for own in own_optimizers():
        if own.codec:
            tensors = own.codec.decode(tensors)
    return tensors
