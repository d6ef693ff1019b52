"""Opens the data and builds the model, before there is a plan."""

from collections.abc import Callable

import torch
from torch import nn

from motley.config.options import Config
from motley.plan.engine_traits import EngineTraits
from motley.planner.foresee import narrow_type, prepare
from motley.planner.process_group import ProcessGroup
from motley.tasks.build import build
from motley.tasks.check import check_task
from motley.tasks.find import task_of
from motley.tasks.model import TaskModel, set_matmul_precision
from motley.tasks.net import set_attention
from motley.tasks.task import Task

# Wraps a task's network, in a precision, on a device.
ModelFactory = Callable[[Task, nn.Module, str, torch.device], TaskModel]


def open_model(
    group: ProcessGroup,
    config: Config,
    make: ModelFactory = TaskModel,
    traits: EngineTraits | None = None,
) -> TaskModel | None:
    """Open the data and build the model; None on a rank that is left out.

    Args:
        traits: of the engine that is to train it; None: it is only measured.

    Raises:
        MotleyError: something is wrong with the task, or the model cannot fit.
    """
    if group.rank is None:
        return None
    traits = traits or EngineTraits()
    task, precision = task_of(config), group.precisions[group.rank]
    set_matmul_precision(precision)
    net, by_blocks = build(task, config)
    held = 0.0
    if by_blocks:
        held = prepare(task, net, group, config, traits).beside_activations
        by_blocks.fold(group.device)
    sometimes_unused = check_task(TaskModel(task, net, "fp32", group.device))
    set_attention(net, config.attention)
    model = make(task, net, precision, group.device)
    model.by_blocks, model.held_mib = by_blocks, held
    if task.sometimes_unused and not sometimes_unused:
        sometimes_unused = tuple(key for key, each in net.named_parameters() if each.requires_grad)
    model.sometimes_unused = sometimes_unused
    model.try_attention(config.attention)
    if by_blocks and (dtype := narrow_type(task, group.precisions, traits)):
        by_blocks.narrow(dtype)
    return model
