"""What a user may choose of training on images and their classes."""

from dataclasses import dataclass

from motley.config.option import Decides, fraction, naturals, not_negative, option, positive
from motley.data.dataset import dataset_name, known_datasets
from motley.tasks.task import Task

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
