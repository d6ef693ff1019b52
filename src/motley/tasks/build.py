"""Builds a task's network: whole, or without numbers, for a model that no rank need hold whole."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from motley.config.options import Config
from motley.errors import MotleyError
from motley.tasks.block_by_block import BlockByBlock
from motley.tasks.deferred import record
from motley.tasks.ghost_batch_norm import batch_norms
from motley.tasks.net import build_net, prepared
from motley.tasks.task import Task

LARGE = 1_000_000_000  # parameters; alike on all machines, whatever memory they have
_COUNTED = LARGE // 3  # after so many it is looked how many there are, before more are drawn


class _Large(BaseException):
    """No task catches it."""


def build(task: Task, config: Config) -> tuple[nn.Module, BlockByBlock | None]:
    """The task's network, and what gives it its numbers, where ``--build`` says blocks; it has them
    else.

    Raises:
        MotleyError: the user wants it block by block, and it cannot be.
    """
    if config.build == "blocks":
        if given := _begins_with_weights(task, config):
            raise MotleyError(
                f"--build blocks draws initial numbers, and {given} has others; leave out one of "
                "the two"
            )
        try:
            return _by_blocks(task, config)
        except (NotImplementedError, RuntimeError) as error:
            said = " ".join(str(error).split())[:200]
            raise MotleyError(
                f"--build blocks: the model of {type(task).__name__} cannot be built without "
                f"numbers ({said}); take --build whole"
            ) from error
    if config.build == "whole" or _begins_with_weights(task, config):
        return build_net(task, config), None
    try:
        return _build_small(task, config), None
    except _Large:
        pass
    try:
        net, by_blocks = _by_blocks(task, config)
    except (NotImplementedError, RuntimeError, MotleyError):  # of all ranks alike
        return build_net(task, config), None
    if sum(each.numel() for each in net.parameters()) > LARGE:
        return net, by_blocks
    return build_net(task, config), None


def _begins_with_weights(task: Task, config: Config) -> str:
    """What gives it weights, as a user would write it; empty: random numbers."""
    if config.initial_checkpoint is not None:
        return "--initial-checkpoint"
    return "--pretrained" if task.begins_with_weights else ""


def _build_small(task: Task, config: Config) -> nn.Module:
    numbers = 0

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal numbers
        numbers += 0 if parameter is None else parameter.numel()
        if numbers > _COUNTED:
            raise _Large

    hook = register_module_parameter_registration_hook(count)
    try:
        return build_net(task, config)
    finally:
        hook.remove()


def _by_blocks(task: Task, config: Config) -> tuple[nn.Module, BlockByBlock]:
    torch.manual_seed(config.seed)
    net, recording = record(task.model, config.seed)
    if norms := batch_norms(net):
        raise MotleyError(
            f"--build blocks: the model has batch norm ({next(iter(norms))}); take --build whole"
        )
    for path, part in net.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                where = ".".join(filter(None, (path, name)))
                raise NotImplementedError(f"{where} is a tensor, and no parameter or buffer")
    net = prepared(net, task, config)
    return net, BlockByBlock(net, recording, task.blocks(net))
