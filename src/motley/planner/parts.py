"""Opens the data and builds the model, before there is a plan."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from motley.config.options import Config
from motley.data.dataset import load_images
from motley.data.images import Images
from motley.planner.process_group import ProcessGroup
from motley.tasks.model import (
    Classifier,
    build_model,
    image_size,
    set_attention,
    set_matmul_precision,
)

# Wraps a network for images, of so many pixels a side, in a precision, on a device, with labels
# smoothed so much.
ModelFactory = Callable[[nn.Module, Images, int, str, torch.device, float], Classifier]


@dataclass(frozen=True)
class Parts:
    """What a rank that trains has before there is a plan."""

    images: Images
    model: Classifier


def open_parts(
    group: ProcessGroup, config: Config, make: ModelFactory = Classifier
) -> Parts | None:
    """Open the data and build the model; None on a rank that is left out."""
    if group.rank is None:
        return None
    img_size, precision = image_size(config), group.precisions[group.rank]
    set_matmul_precision(precision)
    images = load_images(config, img_size)
    net = build_model(config, images)
    set_attention(net, config.attention)
    model = make(net, images, img_size, precision, group.device, config.smoothing)
    model.try_attention(config.attention)
    return Parts(images, model)
