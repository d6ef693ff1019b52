"""timm's image classifiers: their names, image sizes and construction, and the options of training
on images and their classes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from motley.config.option import Decides, fraction, naturals, not_negative, option, positive
from motley.data.datasets import dataset_name, known_datasets
from motley.data.import_timm import timm
from motley.data.transforms import Look
from motley.errors import MotleyError
from motley.tasks.ghost_batch_norm import batch_norms
from motley.tasks.task import Task
from motley.text import did_you_mean

# timm's fields about a model's pre-trained weights, which are not those that were trained here.
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
    """A ViT the size of the digits: 8x8 pixels in patches of 4, 0.45 M parameters. Of a name that
    timm has, with other sizes: so that it is known where this file is not."""
    size = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10}
    shape = {"embed_dim": 96, "depth": 4, "num_heads": 3, "global_pool": "avg"}
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        options.pop(name, None)
    net: nn.Module = timm.create_model("vit_tiny_patch16_224", **{**size, **shape, **options})
    return net


def native_size(name: str) -> int:
    """Pixels a side that a model is made for.

    Raises:
        MotleyError: timm has no such model.
    """
    if not timm.is_model(name):
        raise MotleyError(
            f"--model {name} is unknown to timm {timm.__version__}"
            f"{did_you_mean(name, timm.list_models())}"
        )
    if name == "vit_digits":
        return 8
    pretrained = timm.get_pretrained_cfg(name)
    return int(pretrained.input_size[-1]) if pretrained else 224


def check_square(name: str) -> None:
    """Raise MotleyError for a model that is made for images with sides of two lengths."""
    pretrained = timm.get_pretrained_cfg(name)
    height, width = pretrained.input_size[1:] if pretrained else (0, 0)
    if height != width:
        raise MotleyError(
            f"--model {name} is made for images of {width}x{height} pixels, and images are square "
            f"here; add --img-size {width}"
        )


def data_config(name: str) -> dict[str, Any]:
    """Mean, std, interpolation and crop that a model was made with; ImageNet's usual ones of a
    model of which timm does not say."""
    known: Any = timm.get_pretrained_cfg(name)
    own = {"interpolation": "bilinear"} if known is None else known.to_dict()
    return dict(timm.data.resolve_data_config({}, pretrained_cfg=own))  # type: ignore[no-untyped-call]


def has_fixed_size(name: str) -> bool:
    """Whether a model is made for images of one size, as a ViT is; a ResNet takes any."""
    pretrained = timm.get_pretrained_cfg(name)
    return pretrained is None or bool(pretrained.fixed_input_size)


def build_classifier(name: str, **options: Any) -> nn.Module:
    """timm's model of this name; MotleyError if it cannot be built so."""
    try:
        net: nn.Module = timm.create_model(name, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError, OSError) as error:
        if options.get("pretrained"):
            raise MotleyError(
                f"--pretrained: the weights of {name} are not here, and cannot be fetched "
                f"({str(error).splitlines()[0]}); fetch them once where there is a network, or "
                "give a file of them by --initial-checkpoint"
            ) from None
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise MotleyError(f"--model {name} cannot be built with {given}: {error}") from None
    return net


def has_batch_norm(name: str) -> bool:
    """Whether a model takes statistics of the batch."""
    with torch.device("meta"):
        return bool(batch_norms(build_classifier(name)))


def blocks_of(net: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a timm model by name, in order: a rule of their classes would take the stages
    of Swin and ConvNeXt."""
    return {
        name: part for name, part in net.named_modules()
        if name.split(".")[-2:-1] == ["blocks"]
    }  # fmt: skip


def head_of(net: nn.Module) -> tuple[str, ...]:
    """The path of what tells the classes apart; of both, where a model has two."""
    found: Any = net.get_classifier() if hasattr(net, "get_classifier") else ()  # type: ignore[operator]
    heads = found if isinstance(found, tuple | list) else (found,)
    return tuple(name for name, part in net.named_modules() if any(part is head for head in heads))


def adapted(tensors: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Weights as timm's model takes them: of other names, or of images of another size."""
    convert = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    return tensors if convert is None else dict(convert(tensors, net))


def save_classifier(net: Any, folder: Path, look: Look, names: Sequence[str]) -> None:
    """A folder that timm and transformers load: model.safetensors and config.json, with how images
    are to be made, and the names of the classes where they are known."""
    of_other_weights = dict.fromkeys((*_OF_WEIGHTS, "label_names", "label_descriptions"))
    net.pretrained_cfg = {
        **net.pretrained_cfg, **of_other_weights, "mean": look.mean, "std": look.std,
        "crop_pct": look.crop, "crop_mode": look.crop_mode, "interpolation": look.interpolation,
        "input_size": (len(look.mean), look.size, look.size),
    }  # fmt: skip
    known = {"label_names": list(names)} if names else {}
    timm.models.save_for_hf(net, str(folder), model_config=known, safe_serialization=True)


MODEL, NUMBERS, SPEED = Decides.MODEL, Decides.NUMBERS, Decides.SPEED


# DeiT's of ImageNet from scratch (Touvron et al., 2021, for a batch of 1,024); the usual one for
# weights that are there; and what the lab of lab/tesla_lab.json did, whose images fill no epoch.
RECIPES = {
    "deit": (
        "--epochs 300 --warmup-epochs 5 --lr 1e-3 --min-lr 1e-5 --weight-decay 0.05 "
        "--drop-path 0.1 --aa rand-m9-mstd0.5-inc1 --reprob 0.25 --mixup 0.8 --cutmix 1.0"
    ),
    "finetune": (
        "--pretrained --epochs 30 --warmup-epochs 3 --lr 5e-4 --min-lr 1e-6 --weight-decay 0.05 "
        "--layer-decay 0.75 --drop-path 0.1 --clip-grad 1.0"
    ),
    "lab": "--epochs 100 --warmup-epochs 10 --lr 1e-3 --aa rand-m7-mstd0.5 --reprob 0.25",
}


@dataclass(frozen=True)
class ImageOptions(Task):
    """The fields of motley.tasks.builtin.image.ImageTask, each an option."""

    recipes = RECIPES

    name: str | None = option(
        "timm name; default: vit_digits for digits, else vit_base_patch16_224",
        MODEL | SPEED, name="model", usual="of timm; default: ViT-B/16, for digits a small one",
    )  # fmt: skip
    img_size: int | None = option(
        "default: the model's own", MODEL | SPEED, read=positive, metavar="PIXELS",
        usual="default: the model's own",
    )  # fmt: skip
    drop: float = option("drop-out, default 0", NUMBERS, 0.0, read=fraction, metavar="P")
    drop_path: float = option(
        "stochastic depth, default 0", NUMBERS, 0.0, read=fraction, metavar="P"
    )
    dataset: str = option(
        "; ".join(f"{each.name} {each.says}" for each in known_datasets().values()),
        MODEL | SPEED, "digits", read=dataset_name, metavar="|".join(known_datasets()),
        usual="default: digits, which need no download",
    )  # fmt: skip
    data_dir: str = option(
        "default: data", NUMBERS, "data", metavar="DIR", usual="where it is, default: data"
    )
    augment: bool = option("no random crops and flips", NUMBERS, True)
    recipe: str | None = option(
        f"{'; '.join(f'{name}: {words}' for name, words in RECIPES.items())}; what you write "
        "besides comes after it",
        Decides.NOTHING, metavar="|".join(RECIPES),
    )  # fmt: skip
    # SPEED: with any of these small images are enlarged by the host, not by the device.
    aa: str | None = option(
        "timm's RandAugment or AutoAugment, as in rand-m9-mstd0.5; default: none",
        NUMBERS | SPEED, metavar="POLICY",
    )  # fmt: skip
    color_jitter: float = option(
        "of brightness, contrast and saturation, default 0", NUMBERS | SPEED, 0.0,
        read=not_negative, metavar="J",
    )  # fmt: skip
    reprob: float = option(
        "random erasing, by noise, default 0", NUMBERS | SPEED, 0.0, read=fraction, metavar="P"
    )
    mixup: float = option(
        "alpha of mixup; samples 2k and 2k + 1 of a batch are mixed; default 0: none",
        NUMBERS | SPEED | Decides.PLAN, 0.0, read=not_negative, metavar="A",
    )  # fmt: skip
    cutmix: float = option(
        "alpha of CutMix, default 0: none", NUMBERS | SPEED | Decides.PLAN, 0.0,
        read=not_negative, metavar="A",
    )  # fmt: skip
    mixup_prob: float = option(
        "that a pair is mixed, default 1", NUMBERS, 1.0, read=fraction, metavar="P"
    )
    mixup_switch_prob: float = option(
        "that it is by CutMix, where both are given, default 0.5", NUMBERS, 0.5, read=fraction,
        metavar="P",
    )  # fmt: skip
    pretrained: bool = option(
        "begin with timm's weights of this model, from its hub or cache", NUMBERS, False
    )
    classes: tuple[int, ...] | None = option(
        "of these classes of the data set alone, counted from 0 in this order; default: all",
        MODEL, read=naturals, metavar="C,...",
    )  # fmt: skip
    smoothing: float = option(
        "label smoothing, default 0.1", NUMBERS, 0.1, read=fraction, metavar="S"
    )
    bn_group: int = option(
        "consecutive samples over which a batch norm takes its statistics, whoever computes them; "
        "default 32. --batch-size must be a multiple, and shares are",
        NUMBERS | SPEED | Decides.PLAN, 32, read=positive, metavar="G",
    )  # fmt: skip
