"""timm's image classifiers: their names, image sizes, construction and files."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from motley.data.import_timm import timm
from motley.data.transforms import Look
from motley.errors import MotleyError
from motley.tasks.ghost_batch_norm import batch_norms
from motley.text import did_you_mean

# timm's fields that describe pre-trained weights; they do not apply to weights trained here.
_OF_WEIGHTS = (
    "tag",
    "url",
    "file",
    "hf_hub_id",
    "hf_hub_filename",
    "source",
    "license",
    "description",
    "origin_url",
    "paper_name",
    "paper_ids",
    "notes",
    "test_input_size",
    "test_crop_pct",
)


@timm.models.register_model
def vit_digits(pretrained: bool = False, **options: Any) -> nn.Module:
    """Build a ViT for the digits: 8x8 pixels in patches of 4, 0.45 M parameters.

    The model is a registered timm model with other sizes, so a program without this file can build
    the model.
    """
    size = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10}
    shape = {"embed_dim": 96, "depth": 4, "num_heads": 3, "global_pool": "avg"}
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        options.pop(name, None)
    net: nn.Module = timm.create_model("vit_tiny_patch16_224", **{**size, **shape, **options})
    return net


@dataclass(frozen=True)
class Classifier:
    """An image classifier of timm, identified by its name in timm."""

    name: str

    @cached_property
    def native_size(self) -> int:
        """Side in pixels of the images for which the model is made.

        Raises:
            MotleyError: timm has no such model.
        """
        if not timm.is_model(self.name):
            raise MotleyError(
                f"--model {self.name} is not a model of timm "
                f"{timm.__version__}{did_you_mean(self.name, timm.list_models())}"
            )
        if self.name == "vit_digits":
            return 8
        pretrained = timm.get_pretrained_cfg(self.name)
        return int(pretrained.input_size[-1]) if pretrained else 224

    def check_square(self) -> None:
        """Raise MotleyError if the model is made for images that are not square."""
        pretrained = timm.get_pretrained_cfg(self.name)
        height, width = pretrained.input_size[1:] if pretrained else (0, 0)
        if height != width:
            raise MotleyError(
                f"--model {self.name} is made for images of {width}x{height} pixels, and Motley "
                f"makes images square; add --img-size {width}"
            )

    def data_config(self) -> dict[str, Any]:
        """Return the mean, std, interpolation and crop with which the model was trained.

        If timm has no such values for the model, ImageNet's usual values are returned.
        """
        known: Any = timm.get_pretrained_cfg(self.name)
        own = {"interpolation": "bilinear"} if known is None else known.to_dict()
        return dict(timm.data.resolve_data_config({}, pretrained_cfg=own))  # type: ignore[no-untyped-call]

    @property
    def has_fixed_size(self) -> bool:
        """True if the model takes images of one size only, as a ViT does."""
        pretrained = timm.get_pretrained_cfg(self.name)
        return pretrained is None or bool(pretrained.fixed_input_size)

    @cached_property
    def has_batch_norm(self) -> bool:
        """True if the model has a batch norm that is trained."""
        with torch.device("meta"):
            return bool(batch_norms(self.build()))

    def build(self, **options: Any) -> nn.Module:
        """Build and return timm's model.

        Raises:
            MotleyError: timm cannot build the model with these options.
        """
        name = self.name
        try:
            net: nn.Module = timm.create_model(name, **options)
        except (TypeError, ValueError, AssertionError, RuntimeError, OSError) as error:
            if options.get("pretrained"):
                raise MotleyError(
                    f"--pretrained: the weights of {name} are not on this machine, and cannot be "
                    f"downloaded ({str(error).splitlines()[0]}); download them once on a machine "
                    "with a network, or give a file of weights with --initial-checkpoint"
                ) from None
            given = ", ".join(f"{key}={value}" for key, value in options.items())
            raise MotleyError(f"--model {name} cannot be built with {given}: {error}") from None
        return net


def list_blocks(net: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a timm model by name, in order.

    A block is a member of a list that is named ``blocks``. A search for lists of equal modules
    would find the stages of Swin and ConvNeXt instead.
    """
    return {
        name: part for name, part in net.named_modules()
        if name.split(".")[-2:-1] == ["blocks"]
    }  # fmt: skip


def find_head(net: nn.Module) -> tuple[str, ...]:
    """Return the path of a model's classifier, or two paths if the model has two classifiers."""
    result: Any = net.get_classifier() if hasattr(net, "get_classifier") else ()  # type: ignore[operator]
    heads = result if isinstance(result, tuple | list) else (result,)
    return tuple(name for name, part in net.named_modules() if any(part is head for head in heads))


def adapted(tensors: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Return weights converted to the parameter names and the image size of ``net``."""
    convert = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    return tensors if convert is None else dict(convert(tensors, net))


def save_classifier(net: Any, folder: Path, look: Look, names: Sequence[str]) -> None:
    """Save model.safetensors and config.json into a folder, for timm and transformers.

    The file config.json describes the preparation of images, and contains the names of the classes
    if these are known.
    """
    of_other_weights = dict.fromkeys((*_OF_WEIGHTS, "label_names", "label_descriptions"))
    net.pretrained_cfg = {
        **net.pretrained_cfg, **of_other_weights, "mean": look.mean, "std": look.std,
        "crop_pct": look.crop, "crop_mode": look.crop_mode, "interpolation": look.interpolation,
        "input_size": (len(look.mean), look.size, look.size),
    }  # fmt: skip
    known = {"label_names": list(names)} if names else {}
    timm.models.save_for_hf(net, str(folder), model_config=known, safe_serialization=True)
