"""The image task: timm's models that predict classes, labels or values of images."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.config.option import (
    Decides,
    Keyword,
    above_zero,
    fraction,
    named_path,
    names,
    natural,
    naturals,
    not_negative,
    option,
    positive,
)
from motley.data.datasets import (
    CLASS,
    LABELS,
    VALUE,
    dataset_name,
    find_dataset,
    known_datasets,
)
from motley.errors import MotleyError
from motley.tasks.metrics import DIRECTIONS, MEASURES, metric_name
from motley.tasks.task import Net, Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from motley.data.images import Images
    from motley.data.source import Samples, Source, Tensors
    from motley.data.transforms import Look, Mixing, Transform
    from motley.tasks.classifiers import Classifier
    from motley.tasks.targets import Target

MODEL, NUMBERS, SPEED = Decides.MODEL, Decides.NUMBERS, Decides.SPEED


# "deit": DeiT's recipe for ImageNet from scratch (Touvron et al., 2021, for a batch of 1,024).
# "finetune": a usual recipe for pre-trained weights. "lab": the recipe of lab/tesla_lab.json.
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


def crops(text: str) -> int:
    """Parse the number of crops per held-out image: 1, 5 or 10."""
    count = natural(text)
    if count not in (1, 5, 10):
        raise argparse.ArgumentTypeError(
            f"{count} is not a possible number of crops; choose 1, 5 or 10"
        )
    return count


def copies(text: str) -> int:
    """Parse the number of images of a training sample; 0 and 1 mean one image, as in timm."""
    return max(1, natural(text))


def _pair(
    flag: str, given: tuple[float, ...] | None, usual: tuple[float, float]
) -> tuple[float, float]:
    """Return the two numbers of an option, the smaller one first.

    Args:
        flag: the option, for errors.
        given: the numbers that the user gave; None: the option is not given.
        usual: the default.
    """
    if given is None:
        return usual
    if len(given) != 2 or given[0] > given[1] or given[0] <= 0:
        words = " ".join(f"{each:g}" for each in given)
        raise MotleyError(
            f"{flag} {words}: give two numbers above 0, the smaller one first, as in {flag} "
            f"{usual[0]:.3g} {usual[1]:.3g}"
        )
    return given[0], given[1]


_USUAL_DIR = "data"


@dataclass(frozen=True)
class ImageTask(Task):
    """The task of predicting classes, labels or values of images.

    A batch has ``images``, uint8 [n, C, H, W], and ``labels``; see motley.tasks.targets. The images
    have the model's size, or are smaller (see Look.enlarged). If images are mixed in pairs, the
    batch also has ``partners``, the labels of the second images, and ``own``, the weights of
    ``labels``, fp32 [n]. With weighted classes a training batch has ``weights``, fp32 [n]. With
    ``--aug-splits K`` the images of a training batch are [n, K, C, H, W].
    """

    noun = "image"
    unit = "images"
    head_options = ("dataset", "data_dir", "classes", "labels", "label_columns", "target")
    recipes = RECIPES
    directions = DIRECTIONS

    name: str | None = option(
        "timm's name of the model; default: vit_digits for digits, else vit_base_patch16_224",
        MODEL | SPEED, name="model", usual="timm's name; default: ViT-B/16, vit_digits for digits",
    )  # fmt: skip
    img_size: int | None = option(
        "side of an image; default: the model's own", MODEL | SPEED, read=positive,
        metavar="PIXELS", usual="side of an image; default: the model's own",
    )  # fmt: skip
    drop: float = option(
        "drop-out probability, default 0", NUMBERS, 0.0, read=fraction, metavar="P"
    )
    drop_path: float = option(
        "probability of stochastic depth, default 0", NUMBERS, 0.0, read=fraction, metavar="P"
    )
    dataset: str = option(
        "; ".join(f"{each.name} {each.says}" for each in known_datasets().values()),
        MODEL | SPEED, "digits", read=dataset_name, metavar="|".join(known_datasets()),
        usual="default: digits, which need no download",
    )  # fmt: skip
    data_dir: str = option(
        "folder of the data set, default: data; without --dataset, a folder of images with one "
        "folder per class",
        NUMBERS, _USUAL_DIR, metavar="DIR", usual="folder of the data, default: data",
    )  # fmt: skip
    labels: str | None = option(
        "CSV file with the labels of the images below --data-dir, and optionally a column split "
        "with train and val; default: folder names are the labels",
        MODEL, metavar="FILE.csv",
    )  # fmt: skip
    label_columns: tuple[str, ...] | None = option(
        "columns of that file for the image, the label, and the split; default: by usual names, "
        "such as file,label,split",
        MODEL, read=names, metavar="FILE,LABEL[,SPLIT]",
    )  # fmt: skip
    target: str = option(
        "kind of label: class (default); labels, any number of them, separated by | ; , or a "
        "blank; value, a number",
        MODEL | SPEED, CLASS, choices=(CLASS, LABELS, VALUE),
    )  # fmt: skip
    value_loss: str = option(
        "loss of --target value: mse, the squared error (default), or l1, the absolute error",
        NUMBERS, "mse", choices=("mse", "l1"),
    )  # fmt: skip
    class_weights: str | None = option(
        "weights of the classes in the loss: balanced, by the inverse number of training images; "
        "a file with one number per line; or numbers. Weighted means are divided by the sum of "
        "weights; default: none",
        NUMBERS, metavar="balanced|FILE|W,...",
    )  # fmt: skip
    balanced_sampling: bool = option(
        "draw equally many training images of each class in an epoch", NUMBERS, False
    )
    augment: bool = option("do not crop or flip images at random", NUMBERS, True)
    recipe: str | None = option(
        f"{'; '.join(f'{name}: {words}' for name, words in RECIPES.items())}; options that you "
        "give take precedence",
        Decides.NOTHING, metavar="|".join(RECIPES),
    )  # fmt: skip
    # SPEED: with any of these options the host enlarges small images, not the device.
    aa: str | None = option(
        "RandAugment, AutoAugment or AugMix of timm, as in rand-m9-mstd0.5; default: none",
        NUMBERS | SPEED, metavar="POLICY",
    )  # fmt: skip
    color_jitter: float = option(
        "change of brightness, contrast and saturation, default 0", NUMBERS | SPEED, 0.0,
        read=not_negative, metavar="J",
    )  # fmt: skip
    reprob: float = option(
        "random erasing, by noise, default 0", NUMBERS | SPEED, 0.0, read=fraction, metavar="P"
    )
    remode: str = option(
        "content of an erased rectangle: pixel, noise (default); const, the mean; rand, one colour",
        NUMBERS, "pixel", choices=("pixel", "const", "rand"),
    )  # fmt: skip
    recount: int = option(
        "largest number of rectangles that are erased in an image, default 1",
        NUMBERS, 1, read=positive,
        metavar="N",
    )  # fmt: skip
    aug_splits: int = option(
        "images of each training sample, as for AugMix: the first only cropped and mirrored, the "
        "others changed by --aa and --color-jitter, too; default 1",
        NUMBERS | SPEED, 1, read=copies, metavar="K",
    )  # fmt: skip
    jsd_loss: bool = option(
        "AugMix's loss: the cross-entropy of the first image of each sample, and the divergence "
        "between the predictions for all of its images; default: the mean of their losses",
        NUMBERS, False,
    )  # fmt: skip
    resplit: bool = option(
        "with --aug-splits, --reprob does not erase the first image of a sample", NUMBERS, False
    )
    scale: tuple[float, ...] | None = option(
        "smallest and largest part of an image that a random crop takes; default: 0.08 1",
        NUMBERS, read=fraction, metavar="PART", several=True,
    )  # fmt: skip
    ratio: tuple[float, ...] | None = option(
        "smallest and largest aspect ratio (width to height) of a random crop; default: 0.75 "
        "1.3333",
        NUMBERS, read=above_zero, metavar="R", several=True,
    )  # fmt: skip
    hflip: float = option(
        "probability that a training image is mirrored, default 0.5",
        NUMBERS,
        0.5,
        read=fraction,
        metavar="P",
    )
    vflip: float = option(
        "probability that a training image is turned upside down, default 0",
        NUMBERS, 0.0, read=fraction,
        metavar="P",
    )  # fmt: skip
    crop_pct: float | None = option(
        "part of a held-out image's side that is used; default: as in the model's own "
        "configuration, or all for images of one size",
        NUMBERS, read=fraction, metavar="PART",
    )  # fmt: skip
    interpolation: str | None = option(
        "interpolation for resizing; default: as in the model's own configuration",
        NUMBERS, choices=("bilinear", "bicubic", "nearest"),
    )  # fmt: skip
    mixup: float = option(
        "alpha of mixup, which mixes samples 2k and 2k + 1 of a batch; default 0: none",
        NUMBERS | SPEED | Decides.PLAN, 0.0, read=not_negative, metavar="A",
    )  # fmt: skip
    cutmix: float = option(
        "alpha of CutMix, default 0: none", NUMBERS | SPEED | Decides.PLAN, 0.0,
        read=not_negative, metavar="A",
    )  # fmt: skip
    mixup_prob: float = option(
        "probability that a pair is mixed, default 1", NUMBERS, 1.0, read=fraction, metavar="P"
    )
    mixup_switch_prob: float = option(
        "probability of CutMix, if both are given, default 0.5", NUMBERS, 0.5, read=fraction,
        metavar="P",
    )  # fmt: skip
    pretrained: bool = option(
        "start with timm's weights of this model, from its hub or cache", NUMBERS, False
    )
    classes: tuple[int, ...] | None = option(
        "use these classes of the data set alone, counted from 0, in this order; default: all",
        MODEL, read=naturals, metavar="C,...",
    )  # fmt: skip
    smoothing: float = option(
        "label smoothing, default 0.1", NUMBERS, 0.1, read=fraction, metavar="S"
    )
    metrics: tuple[str, ...] | None = option(
        "further metrics of an evaluation, from torchmetrics and over all held-out samples, as "
        "in f1_macro auroc (needs: pip install torchmetrics); default: none",
        Decides.NOTHING, read=metric_name, metavar="NAME", several=True,
    )  # fmt: skip
    eval_data: tuple[Keyword, ...] | None = option(
        "further held-out sets, each evaluated beside the usual one: a name, and a folder with "
        "one folder per class, or with --labels another CSV file; the metrics are NAME/top1, "
        "...; default: none",
        Decides.NOTHING, read=named_path, metavar="NAME=PATH", several=True,
    )  # fmt: skip
    test_crops: int = option(
        "crops of a held-out image whose outputs are averaged: 1 (default), 5 or 10, as "
        "torchvision's FiveCrop and TenCrop",
        Decides.NOTHING, 1, read=crops, metavar="1|5|10",
    )  # fmt: skip
    bce_loss: bool = option(
        "binary cross-entropy of each class instead of the cross-entropy of all", NUMBERS, False
    )
    bce_target_thresh: float | None = option(
        "threshold of --bce-loss: targets above it become 1, the others 0; default: targets stay "
        "as they are",
        NUMBERS, read=fraction, metavar="T",
    )  # fmt: skip
    bn_group: int = option(
        "consecutive samples over which a batch norm computes its statistics, whichever rank has "
        "them; default 32. --batch-size must be a multiple, and shares are whole groups",
        NUMBERS | SPEED | Decides.PLAN, 32, read=positive, metavar="G",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.dataset == "digits" and (self.labels or self.data_dir != _USUAL_DIR):
            object.__setattr__(self, "dataset", "folder")
        if self.name is None:  # records contain the name of the model
            object.__setattr__(self, "name", find_dataset(self.dataset).model)

    def check_options(self) -> None:
        """Raise MotleyError if options contradict each other or have no effect."""
        if self.labels is None and (self.target != CLASS or self.label_columns):
            flag = f"--target {self.target}" if self.target != CLASS else "--label-columns"
            raise MotleyError(
                f"{flag} needs labels from a CSV file; name the file, as in --labels FILE.csv"
            )
        if self.labels and self.dataset != "folder":
            raise MotleyError(
                f"--labels {self.labels} gives labels for a folder of files, and --dataset "
                f"{self.dataset} has its own labels; leave out one of the two"
            )
        if self.label_columns and len(self.label_columns) not in (2, 3):
            raise MotleyError(
                f"--label-columns {','.join(self.label_columns)}: give the column of the file "
                "names and the column of the labels, and optionally that of the split, as in "
                "image_id,tags"
            )
        if self.bce_loss and self.target != CLASS:
            raise MotleyError(
                f"--bce-loss is a loss for classes, and --target {self.target} has another loss; "
                "leave out --bce-loss"
            )
        if self.bce_target_thresh is not None and not self.bce_loss:
            raise MotleyError(
                "--bce-target-thresh has no effect without --bce-loss; add --bce-loss"
            )
        self._check_copies()
        for each in self.metrics or ():
            if self.target not in MEASURES[each].kinds:
                fits = [name for name, other in MEASURES.items() if self.target in other.kinds]
                raise MotleyError(
                    f"--metrics {each} does not apply to --target {self.target}; choose "
                    f"{', '.join(fits)}"
                )
        if self._mixes and self.bn_group % 2 and self.classifier.has_batch_norm:
            raise MotleyError(
                f"--bn-group {self.bn_group} is odd, and --mixup and --cutmix mix pairs of "
                "samples within a group; give an even number"
            )

    def _check_copies(self) -> None:
        """Raise MotleyError if options do not fit the number of images of a sample."""
        if self.aug_splits == 1:
            if self.jsd_loss or self.resplit:
                flag = "--jsd-loss" if self.jsd_loss else "--resplit"
                raise MotleyError(f"{flag} needs several images of each sample; add --aug-splits 3")
            return
        if not (self.aa or self.color_jitter):
            raise MotleyError(
                f"--aug-splits {self.aug_splits}: without a change of colours or shapes all images "
                "of a sample would be equal; add --aa augmix-m5-w4-d2, or --color-jitter 0.4"
            )
        if self._mixes:
            raise MotleyError(
                "--aug-splits does not go with --mixup and --cutmix, which mix one image of each "
                "sample; leave out one of the two"
            )
        if self.jsd_loss and (self.target != CLASS or self.bce_loss or self.class_weights):
            flag = (
                f"--target {self.target}" if self.target != CLASS
                else "--bce-loss" if self.bce_loss else "--class-weights"
            )  # fmt: skip
            raise MotleyError(
                f"--jsd-loss compares the probabilities of classes, and {flag} changes the loss; "
                "leave out one of the two"
            )

    @cached_property
    def classifier(self) -> "Classifier":
        """The model that ``--model`` names."""
        from motley.tasks.classifiers import Classifier

        return Classifier(str(self.name))

    @cached_property
    def size(self) -> int:
        """Side of an image in pixels."""
        own = self.classifier.native_size
        if self.img_size is None:
            self.classifier.check_square()
        return self.img_size or own

    @cached_property
    def grain(self) -> int:  # type: ignore[override]
        """Number of consecutive samples that stay together on one rank."""
        return self.bn_group if self.classifier.has_batch_norm else 2 if self._mixes else 1

    @property
    def grain_is(self) -> str:  # type: ignore[override]
        """Reason for the grain, and the option that sets the grain, for errors."""
        if self.classifier.has_batch_norm:
            return "share one batch norm (--bn-group)"
        return "are mixed with one another (--mixup, --cutmix)"

    @property
    def _mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @cached_property
    def _mixing(self) -> "Mixing":
        from motley.data.transforms import Mixing

        return Mixing(self.mixup, self.cutmix, self.mixup_prob, self.mixup_switch_prob)

    @cached_property
    def images(self) -> "Images":
        """The data set that ``--dataset`` names. The first access opens it."""
        from motley.data.images import select_classes

        if self.labels is not None:
            from motley.data.labels import open_labelled

            images = open_labelled(
                Path(self.data_dir), Path(self.labels), self.label_columns or (), self.target
            )
        else:
            images = find_dataset(self.dataset).open(Path(self.data_dir), self.size)
        if self.classes is None:
            return images
        if images.kind != CLASS:
            raise MotleyError(
                f"--classes: with --target {images.kind} an image has no single class, by which "
                "it could be chosen; leave out --classes"
            )
        return select_classes(images, self.classes)

    @cached_property
    def _target(self) -> "Target":
        from motley.tasks.targets import ClassTarget, LabelsTarget, ValueTarget

        images, measures = self.images, self.metrics or ()
        if images.kind == VALUE and self.class_weights is None:
            return ValueTarget(self.value_loss, measures)
        weight = self._class_weight
        if images.kind == LABELS:
            return LabelsTarget(images.class_names, weight, measures)
        return ClassTarget(
            images.class_names, self.smoothing, weight, measures, self.bce_loss,
            self.bce_target_thresh,
        )  # fmt: skip

    @cached_property
    def _class_weight(self) -> "Tensor | None":
        if self.class_weights is None:
            return None
        import torch

        from motley.data.labels import read_class_weights

        return torch.tensor(read_class_weights(self.class_weights, self.images))

    @cached_property
    def look(self) -> "Look":
        """The preparation of images for the model: size, crop and normalisation.

        If the weights are random and the data set has a mean and a standard deviation, pixels are
        normalised by these values. Otherwise pixels are normalised by the values with which the
        model was trained.
        """
        from motley.data.transforms import Look

        usual, images = self.classifier.data_config(), self.images
        known = images.mean and images.std and not self.pretrained
        return Look(
            self.size,
            tuple(images.mean if known and images.mean else usual["mean"])[: images.channels],
            tuple(images.std if known and images.std else usual["std"])[: images.channels],
            self.interpolation or usual["interpolation"],
            # Images of a known size are resized to the model's size, and not cropped.
            self.crop_pct or (1.0 if images.native_size else usual["crop_pct"]),
            usual["crop_mode"],
            self.augment, self.aa or "", self.color_jitter, self.reprob, self.cutmix > 0,
            _pair("--scale", self.scale, Look.scale), _pair("--ratio", self.ratio, Look.ratio),
            self.hflip, self.vflip, self.remode, self.recount, self.aug_splits, not self.resplit,
        )  # fmt: skip

    @cached_property
    def _training(self) -> "Transform":
        return self.look.for_training(self.images)

    @cached_property
    def _evaluation(self) -> "Transform":
        if self.test_crops > 1:
            return self.look.for_crops(self.test_crops)
        return self.look.for_evaluation(self.images)

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        """True if runs of this task write checkpoints."""
        return find_dataset(self.dataset).keeps

    @property
    def needs_workers(self) -> bool:  # type: ignore[override]
        """True if reading a sample takes longer than passing it between processes."""
        is_changed = bool(self.aa or self.color_jitter or self.reprob)
        return is_changed or find_dataset(self.dataset).needs_workers

    def on(self, device: "torch.device") -> "Samples":
        """Return the object that reads samples for a rank with this device.

        If the images fit into the memory of a GPU, they are shifted and mirrored on the GPU.
        """
        from motley.data.transforms import resident

        own = all(
            getattr(type(self), name) is getattr(ImageTask, name)
            for name in ("data", "sample", "collate", "weights")
        )  # a subclass may read other samples
        if device.type != "cuda" or self._mixes or not own or self.class_weights:
            return self
        known: dict[torch.device, Samples] = self.__dict__.setdefault("_on", {})
        if device not in known:
            known[device] = resident(self, self.images.train, self._training, device) or self
        return known[device]

    def prepare(self) -> None:
        """Download or unpack missing data. One rank of each host calls this method."""
        find_dataset(self.dataset).prepare(Path(self.data_dir))

    def model(self) -> "nn.Module":
        """Return the network, on the CPU."""
        options: dict[str, Any] = {
            "num_classes": self.images.classes, "in_chans": self.images.channels,
        }  # fmt: skip
        optional = {
            "drop_rate": self.drop,
            "drop_path_rate": self.drop_path,
            "img_size": self.img_size if self.classifier.has_fixed_size else None,
        }
        options |= {key: value for key, value in optional.items() if value}
        return self.classifier.build(**options)

    def blocks(self, net: "nn.Module") -> "dict[str, nn.Module]":
        """Return the blocks of the network by name, in order."""
        from motley.tasks.classifiers import list_blocks

        return list_blocks(net)

    def head(self, net: "nn.Module") -> tuple[str, ...]:
        """Return the names of the modules whose shape depends on the data."""
        from motley.tasks.classifiers import find_head

        return find_head(net)

    def adapt(self, tensors: "dict[str, Tensor]", net: "nn.Module") -> "dict[str, Tensor]":
        """Convert weights of another program to the names and shapes of ``net``.

        Position embeddings are interpolated to the image size of ``net``.
        """
        from motley.tasks.classifiers import adapted

        return adapted(tensors, net)

    @property
    def begins_with_weights(self) -> bool:
        """True if a new run may start from pretrained weights."""
        return self.pretrained

    def pretrained_weights(self) -> "tuple[dict[str, Tensor], str] | None":
        """Return the pretrained weights by name, and a description of their source, or None."""
        if not self.pretrained:
            return None
        size = {"img_size": self.size} if self.img_size and self.classifier.has_fixed_size else {}
        net = self.classifier.build(pretrained=True, in_chans=self.images.channels, **size)
        return net.state_dict(), f"timm's {self.name}"

    def save(self, net: "nn.Module", folder: Path) -> None:
        """Save a trained model into a folder, in the format of timm and transformers."""
        from motley.tasks.classifiers import save_classifier

        save_classifier(net, folder, self.look, self.class_names)

    def data(self, held_out: bool) -> "Source":
        """Return the training data or the held-out data."""
        return self.images.test if held_out else self.images.train

    def held_out_sets(self) -> "Mapping[str, Source]":
        """Return additional held-out data sets by name."""
        return self._held_out_sets

    @cached_property
    def _held_out_sets(self) -> "Mapping[str, Source]":
        from motley.data.images import open_held_out
        from motley.data.labels import open_held_out_file

        given = self.eval_data or ()
        if repeated := {
            each.name for each in given if [x.name for x in given].count(each.name) > 1
        }:
            raise MotleyError(
                f"--eval-data names {', '.join(sorted(repeated))} twice; give each set a "
                "different name"
            )
        result: dict[str, Source] = {}
        for each in given:
            path = Path(each.text)
            result[each.name] = open_held_out(self.images, each.name, path) if (
                self.labels is None
            ) else open_held_out_file(
                self.images, each.name, Path(self.data_dir), path, self.label_columns or ()
            )  # fmt: skip
        return result

    def name_of(self, source: "Source", index: int) -> str:
        """Return the name of a sample for an error message."""
        if any(source is each for each in self._held_out_sets.values()):
            return str(source.samples[index][0])  # type: ignore[attr-defined]
        return self.images.name_of(source, index)

    def with_files(self, folder: Path) -> "ImageTask":
        """Return the task with the files below a folder as its held-out samples.

        These samples have no labels.
        """
        from motley.data.images import list_images

        if not folder.is_dir():
            raise MotleyError(f"--images {folder} is not a folder")
        return self.with_paths(list_images([folder]), folder)

    def with_paths(
        self, files: Sequence[Path], folder: Path | None = None, test_crops: int | None = None
    ) -> "ImageTask":
        """Return the task with these files as its held-out samples, without labels.

        Args:
            files: the files.
            folder: a common parent folder of the files, which messages leave out of file names.
            test_crops: number of crops of each image; None: the number that the task has now.
        """
        from motley.data.images import with_files

        changed = replace(self, eval_data=None, test_crops=test_crops or self.test_crops)
        changed.__dict__["images"] = with_files(self.images, files, folder)
        changed.__dict__["look"] = self.look  # images are prepared as in the run's evaluations
        return changed

    def with_rows(self, rows: Sequence[Mapping[str, Any]]) -> Task:
        """Raise MotleyError, because a user gives images as files."""
        raise MotleyError("this is a run of images; name image files, or folders that hold them")

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """Return the tensors of one item of :meth:`data`, by name."""
        image, label = item
        if not training:
            return {"images": self._evaluation(image), "labels": label}
        result = {"images": self._training(image), "labels": label}
        if self.has_weights:
            result["trains"] = True
        return result | {"drawn": self._mixing.draw()} if self._mixes else result

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> "Tensors":
        """Return a batch of samples: tensors by name, with one row for each sample."""
        import torch

        from motley.data.transforms import mix

        *several, _, height, width = samples[0]["images"].shape  # several crops, or none
        shape = (*several, self.images.channels, height, width)
        images = torch.empty((len(samples), *shape), dtype=torch.uint8)
        pixels = images.numpy()  # numpy changes HWC to CHW twice as fast
        for row, sample in enumerate(samples):
            pixels[row] = sample["images"].numpy()
        target = self._target
        labels = target.stack([sample["labels"] for sample in samples])
        batch = {"images": images, "labels": labels}
        if "drawn" in samples[0]:
            drawn = torch.stack([sample["drawn"] for sample in samples])
            batch = mix(images, labels, drawn, self.grain)
        weights = target.weights(labels) if "trains" in samples[0] else None
        if weights is not None and "own" in batch:
            others = target.weights(batch["partners"])
            assert others is not None
            weights = batch["own"] * weights + (1 - batch["own"]) * others
        return batch if weights is None else {**batch, "weights": weights}

    @property
    def has_weights(self) -> bool:
        """True if training images have different weights, which their classes determine."""
        own = type(self).weights is not ImageTask.weights
        return own or (self.class_weights is not None and self.target == CLASS)

    def weights(self, batch: "Tensors") -> "Tensor | None":
        """Return the weight of each sample in the mean loss, [n]. None: all weights are equal."""
        return batch.get("weights")

    def balanced_classes(self) -> Sequence[int] | None:
        """Return the class of each training sample if epochs are to be balanced, else None."""
        if not self.balanced_sampling:
            return None
        from motley.data.labels import labels_to_balance

        return labels_to_balance(self.images)

    def logits(self, net: Net, images: "Tensor") -> "Tensor":
        """Return the logits, fp32 [n, classes], of images, uint8 [n, C, H, W].

        The logits of several crops of an image, [n, crops, C, H, W], are averaged.
        """
        outputs = self._outputs(net, images)
        return outputs.mean(dim=1) if images.dim() == 5 else outputs

    def _outputs(self, net: Net, images: "Tensor") -> "Tensor":
        """Return the logits, fp32 [n, classes], or [n, K, classes] of images [n, K, C, H, W].

        This method enlarges and normalises the images on the device. Until then images are small
        and uint8, so transfers from loader processes and over the PCI bus take fewer bytes.
        """
        if images.dim() == 5:
            return self._outputs(net, images.flatten(0, 1)).view(*images.shape[:2], -1)
        mean, std = self._mean_and_std(images.device)
        centred = self.look.enlarged(images) - mean  # float from here on
        logits: Tensor = net(centred.div_(std))
        return logits

    def _mean_and_std(self, device: "torch.device") -> "tuple[Tensor, Tensor]":
        """Return mean and standard deviation of a pixel, fp32 [1, C, 1, 1] each.

        The two tensors are not buffers of the model, because DDP would broadcast buffers.
        """
        import torch

        cache: dict[torch.device, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_kept", {})
        if device not in cache:
            shape = (1, self.images.channels, 1, 1)
            mean, std = (
                255 * torch.tensor(each, device=device).view(shape)
                for each in (self.look.mean, self.look.std)
            )
            cache[device] = mean, std
        return cache[device]

    def losses(self, net: Net, batch: "Tensors") -> "Tensor":
        """Return the loss of each sample, [n]."""
        outputs, target = self._outputs(net, batch["images"]), self._target
        if outputs.dim() == 3:
            if self.jsd_loss:
                return target.consistency_losses(outputs, batch["labels"])
            each = [target.losses(part, batch["labels"]) for part in outputs.unbind(1)]
            return sum(each[1:], each[0]) / len(each)
        if "own" in batch:
            pairs = batch["labels"], batch["partners"], batch["own"]
            return target.mixed_losses(outputs, *pairs)
        return target.losses(outputs, batch["labels"])

    def scores(self, net: Net, batch: "Tensors") -> "Mapping[str, Tensor]":
        """Return the scores of held-out images by name, [n] each.

        The loss has no label smoothing and no class weights.
        """
        return self._target.scores(self.logits(net, batch["images"]), batch["labels"])

    @property
    def gathered(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the scores that are gathered from all ranks instead of averaged."""
        from motley.tasks.targets import PROBABILITIES, TARGETS

        return (PROBABILITIES, TARGETS) if self._target.gathers else ()

    def compute_metrics(self, gathered: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the metrics that need the scores of all held-out samples together."""
        from motley.tasks.targets import PROBABILITIES, TARGETS

        return self._target.compute_metrics(gathered[PROBABILITIES], gathered[TARGETS])

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics that an evaluation records, given the mean of each score."""
        return self._target.summary(means)

    def words(self, metrics: Mapping[str, float]) -> str:
        """Return the metrics of :meth:`summary` as a text for the progress line."""
        shown = {"top1": "top-1", "top5": "top-5", "map": "mAP", "mae": "MAE", "r2": "R2"}
        as_part = ("top1", "top5", "accuracy", "exact", "map")
        return ", ".join(
            f"{shown.get(name, name)} {value:.2%}" if name in as_part
            else f"{shown.get(name, name)} {value:.4f}"
            for name, value in metrics.items()
        )  # fmt: skip

    def predict(self, net: Net, batch: "Tensors") -> Mapping[str, Sequence[Any]]:
        """Return predictions as the columns of a table, with one row per image.

        The column ``label`` is empty for an image without a label.
        """
        return self._target.columns(self.logits(net, batch["images"]), batch["labels"])

    def pictures(self, batch: "Tensors") -> "Tensor | None":
        """Return the images for the report, or the middle crop of each image with several crops."""
        images = batch["images"]
        return images[:, 4] if images.dim() == 5 else images

    def describe_scores(self, scores: "Mapping[str, Tensor]") -> Mapping[str, Any]:
        """Return the values that the report shows for a held-out sample with a large loss."""
        return self._target.describe(scores)

    def rank(self, net: Net, batch: "Tensors", top_k: int) -> list[dict[str, Any]]:
        """Return a prediction for each image, with the most probable classes first.

        Args:
            net: the model.
            batch: the images.
            top_k: number of classes in a prediction.
        """
        return self._target.rank(self.logits(net, batch["images"]), top_k)

    def noise(self, example: "Tensors", count: int) -> "Tensors":
        """Return a batch of ``count`` images of random pixels, for timing.

        With constant images a GPU draws less power, so its steps would be faster than in training.
        """
        import torch

        like = example["images"]
        dice = torch.Generator(like.device).manual_seed(0)
        return {
            "images": torch.randint(
                256, (count, *like.shape[1:]), dtype=torch.uint8, device=like.device, generator=dice
            ),
            "labels": example["labels"].new_zeros(count, *example["labels"].shape[1:]),
        }

    def identity(self) -> dict[str, Any]:
        """Return the values that a run and the checkpoint that it continues must share."""
        known = {"images_sha256": self.images.identity} if self.images.identity else {}
        return {"img_size": self.size, **known}

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the classes by number. Empty if the classes have no names."""
        return self.images.class_names

    @property
    def account(self) -> str:  # type: ignore[override]
        """Line about samples that were read and left out. Empty if none was left out."""
        return self.images.account

    @cached_property
    def sample_list(self) -> str:  # type: ignore[override]
        """Text with a fingerprint of the list of samples."""
        return self.images.fingerprint()

    def title(self) -> str:
        """Return one line that describes the task."""
        return f"{self.name} at {self.size} pixels on {self.dataset}"


TASKS = (("image", ImageTask),)
