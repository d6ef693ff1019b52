"""The options of the training scripts, with timm's names where timm has one."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from motley.launch.world import launched_rank, stop_usage
from motley.text import did_you_mean

DATASETS = ("digits", "cifar10", "cifar100", "folder", "synthetic")
ATTENTION = ("auto", "fused", "efficient", "plain")


AT_RESUME = "at a resume"  # of a field: what a value other than the checkpoint's does there
MUST, SAID, FREE = "refused", "said", "free"


def _must(**default: Any) -> Any:
    """An option without which the checkpoint's numbers mean nothing."""
    return field(metadata={AT_RESUME: MUST}, **default)


def _said(**default: Any) -> Any:
    """An option on which the numbers depend: the user hears that the run changes there."""
    return field(metadata={AT_RESUME: SAID}, **default)


def _free(**default: Any) -> Any:
    """An option on which they do not: who computes what, how it is kept, how it is shown."""
    return field(metadata={AT_RESUME: FREE}, **default)


@dataclass(frozen=True)
class Config:
    """What a run was asked to do; one field an option, same names.

    Where a field is None the option's help says what stands in for it.
    """

    model: str | None = _must()
    img_size: int | None = _must()
    drop: float = _said()
    drop_path: float = _said()
    dataset: str = _must()
    data_dir: str = _said()
    data_fraction: float = _said()
    augment: bool = _said()
    bad_images: str = _said()
    workers: int | None = _free()
    epochs: int = _said()
    batch_size: int = _said()
    micro_batch: str | None = _free()
    shares: str | None = _free()
    replan: str = _free()
    hosts: str = _free()
    wire: str = _said()
    max_steps: int | None = _free()
    opt: str = _must()
    lr: float = _said()
    weight_decay: float = _said()
    warmup_epochs: float = _said()
    min_lr: float = _said()
    smoothing: float = _said()
    clip_grad: float | None = _said()
    precision: str = _said()
    loss_scale: str = _said()
    compile: bool = _free()
    seed: int = _said()
    run: str | None = _free()
    logs: str = _free()
    resume: str | None = _free()
    save_every: int | None = _free()
    keep: int = _free()
    log_interval: float = _free()
    gpu_log_interval: float = _free()
    tensorboard: bool = _free()
    # What a checkpoint of an older version does not say.
    grad_checkpointing: str | None = _free(default=None)
    attention: str = _free(default="auto")
    offload: str = _free(default="none")
    strategy: str = _free(default="ddp")
    stage: int | None = _free(default=None)
    deepspeed_config: str | None = _free(default=None)
    eval_images: int | None = _said(default=None)


class OneVoice(argparse.ArgumentParser):
    """Argparse for scripts that run on many ranks: help and errors are printed once."""

    def print_help(self, file: object = None) -> None:
        """Print on the first rank alone."""
        if launched_rank() == 0:
            super().print_help()

    def error(self, message: str) -> NoReturn:
        """End with status 2; an unknown option is answered with the nearest known one."""
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2].partition("=")[0]
            message = f"unknown option {word}{did_you_mean(word, self._option_string_actions)}"
        stop_usage(f"{message}; see {self.prog} -h")


def training_parser(description: str) -> OneVoice:
    """The parser of both training scripts.

    Args:
        description: the script's docstring, which holds the examples.
    """
    parser = OneVoice(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", help="timm name; default: vit_digits for digits, else vit_base_patch16_224"
    )
    group.add_argument(
        "--img-size", type=_positive, metavar="PIXELS", help="default: the model's own"
    )
    group.add_argument(
        "--drop", type=_fraction, default=0.0, metavar="P", help="drop-out, default 0"
    )
    group.add_argument(
        "--drop-path", type=_fraction, default=0.0, metavar="P", help="stochastic depth, default 0"
    )
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group.add_argument(
        "--grad-checkpointing",
        nargs="?",
        const="blocks",
        metavar="NAME,...",
        help="compute activations again in the backward pass in place of keeping them: less "
        "memory, up to a third more time. Of all blocks, or of modules of these names, as in "
        "mlp,blocks.0.attn; default: of none",
    )
    group.add_argument(
        "--attention",
        choices=ATTENTION,
        default="auto",
        help="torch's kernels: fused (flash, 16 bits on a GPU), efficient (memory-efficient, GPUs "
        "alone), or plain, each product written out; auto (default): as torch chooses",
    )

    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        choices=DATASETS,
        default="digits",
        help="digits (default) ships with scikit-learn; folder is one folder a "
        "class under --data-dir/train and --data-dir/val; synthetic is for speed",
    )
    group.add_argument("--data-dir", default="data", metavar="DIR", help="default: data")
    group.add_argument(
        "--data-fraction",
        type=_fraction,
        default=1.0,
        metavar="F",
        help="use this part of the training set (weak scaling), default 1",
    )
    group.add_argument(
        "--eval-images",
        type=_positive,
        metavar="N",
        help="evaluate on so many of the held-out images, default all",
    )
    group.add_argument(
        "--no-augment", dest="augment", action="store_false", help="no random crops and flips"
    )
    group.add_argument(
        "--bad-images",
        choices=("fail", "skip"),
        default="fail",
        help="an image that cannot be read ends the run (default), or is counted, "
        "named, and replaced by the next one",
    )
    group.add_argument(
        "-j",
        "--workers",
        type=_natural,
        metavar="N",
        help="loader processes a rank; default: 0 for digits and CPU ranks, else up to 8",
    )

    group = parser.add_argument_group("batch and length")
    group.add_argument(
        "-b",
        "--batch-size",
        type=_positive,
        default=128,
        metavar="N",
        help="GLOBAL batch: samples in one optimizer step over all ranks, default 128",
    )
    group.add_argument(
        "--micro-batch",
        metavar="M[,M...]",
        help="most samples a rank holds at once, one for all or one a rank; "
        "default: the fastest that fits, or with --shares its whole share",
    )
    group.add_argument(
        "--shares",
        metavar="S,S,...|equal",
        help="samples of each rank in proportion, as in 5,4,3,2,1, or equal; default: by "
        "their speed, which is measured",
    )
    group.add_argument(
        "--replan",
        choices=("auto", "off"),
        default="auto",
        help="auto (default): split anew when ranks become slower or faster while it runs, but "
        "not with fsdp or ZeRO 2 and 3, where every pass waits for all and nobody can tell who is "
        "slow; the global batch never changes",
    )
    group.add_argument(
        "--hosts",
        default="auto",
        metavar="auto|all|NAME,...",
        help="who trains: auto (default) leaves out hosts without which a step is shorter, but "
        "none with --shares; all; or these alone",
    )
    group.add_argument(
        "--wire",
        default="auto",
        metavar="auto|exact|bf16|fp16|powersgd:R|local:H",
        help="how gradients are added up: exact, in fp32; rounded to 16 bits, half the bytes; "
        "PowerSGD of rank R, few bytes and inexact; or not at all: each rank takes H steps of its "
        "own before parameters are averaged, inexact. auto (default): exact, or 16 bits if that "
        "is faster and some rank computes in 16 bits anyway",
    )
    group.add_argument("--epochs", type=_positive, default=30, metavar="E", help="default 30")
    group.add_argument("--max-steps", type=_positive, metavar="K", help="stop after K steps")

    group = parser.add_argument_group("optimization")
    group.add_argument("--opt", default="adamw", metavar="NAME", help="timm name, default adamw")
    group.add_argument(
        "--lr",
        type=_above_zero,
        default=1e-3,
        metavar="RATE",
        help="at the top of the schedule, default 1e-3",
    )
    group.add_argument(
        "--weight-decay",
        type=_not_negative,
        default=0.05,
        metavar="W",
        help="not on norms and biases, default 0.05",
    )
    group.add_argument(
        "--warmup-epochs",
        type=_not_negative,
        default=2.0,
        metavar="E",
        help="linear warm-up, default 2; cosine after it",
    )
    group.add_argument(
        "--min-lr",
        type=_not_negative,
        default=1e-5,
        metavar="RATE",
        help="end of the cosine, default 1e-5",
    )
    group.add_argument(
        "--smoothing", type=_fraction, default=0.1, metavar="S", help="label smoothing, default 0.1"
    )
    group.add_argument(
        "--clip-grad",
        type=_above_zero,
        metavar="NORM",
        help="clip the global gradient norm; default: no clipping",
    )
    group.add_argument(
        "--precision",
        default="auto",
        metavar="P[,P...]",
        help="auto (default), fp32, tf32, bf16, fp16; one for all or one a rank",
    )
    group.add_argument(
        "--loss-scale",
        default="auto",
        metavar="auto|dynamic|NUMBER",
        help="shared by all ranks. auto (default): found on the first batches, 1 where no rank "
        "computes in fp16; dynamic: from 2^16; a number: from there, as in 2^20",
    )
    group.add_argument("--seed", type=_natural, default=0, metavar="N", help="default 0")

    group = parser.add_argument_group("records")
    group.add_argument(
        "--run", metavar="NAME", help="the run's folder is LOGS/NAME; default: the time"
    )
    group.add_argument("--logs", default="logs", metavar="DIR", help="default: logs")
    group.add_argument(
        "--resume",
        metavar="PATH|auto",
        help="continue from a checkpoint or a run folder; auto: from --run NAME, "
        "else the newest unfinished run that has a checkpoint",
    )
    group.add_argument(
        "--save-every",
        type=_positive,
        metavar="K",
        help="steps between checkpoints; default: one an epoch, not for synthetic",
    )
    group.add_argument(
        "--keep", type=_positive, default=2, metavar="N", help="checkpoints kept, default 2"
    )
    group.add_argument(
        "--log-interval",
        type=_above_zero,
        default=2.0,
        metavar="SECONDS",
        help="between progress lines when not on a terminal, default 2",
    )
    group.add_argument(
        "--gpu-log-interval",
        type=_above_zero,
        default=2.0,
        metavar="SECONDS",
        help="between samples of the GPU log, default 2",
    )
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write TensorBoard files (needs: pip install tensorboard)",
    )
    return parser  # fmt: skip


def read_config(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> Config:
    """Parse the command line of a training script."""
    return Config(**vars(parser.parse_args(arguments)))


def _number(text: str, kind: type, low: float, high: float, says: str) -> float:
    try:
        value: float = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {says}") from None
    if not low <= value <= high:  # NaN too
        raise argparse.ArgumentTypeError(f"{text} is not {says}")
    return value


def _positive(text: str) -> int:
    return int(_number(text, int, 1, 2**62, "a whole number of 1 or more"))


def _natural(text: str) -> int:
    return int(_number(text, int, 0, 2**62, "a whole number of 0 or more"))


def _not_negative(text: str) -> float:
    return _number(text, float, 0.0, 1e300, "a number of 0 or more")


def _above_zero(text: str) -> float:
    return _number(text, float, 1e-300, 1e300, "a number above 0")


def _fraction(text: str) -> float:
    return _number(text, float, 0.0, 1.0, "a number from 0 to 1")
