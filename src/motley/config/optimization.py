"""The options of the optimizer, its schedule and its numbers: a group of motley.config.options."""

from dataclasses import dataclass

from motley.config.numbers import above_zero, fraction, natural, naturals, not_negative
from motley.config.option import Decides, option
from motley.plan.per_rank import PerRank
from motley.plan.precision import read_loss_scale, read_precisions

MODEL, NUMBERS, SPEED, NOTHING = Decides.MODEL, Decides.NUMBERS, Decides.SPEED, Decides.NOTHING
SCHEDULES = ("cosine", "tanh", "poly", "step", "multistep")


@dataclass(frozen=True)
class OptimizationOptions:
    """optimization"""

    opt: str = option(
        "timm name, default adamw; adamw8bit: its moments take a quarter of the memory",
        MODEL | SPEED, "adamw", metavar="NAME",
    )  # fmt: skip
    lr: float = option(
        "at the top of the schedule, default 1e-3", NUMBERS, 1e-3, read=above_zero, metavar="RATE",
        usual="at the top of the schedule, default 1e-3",
    )  # fmt: skip
    weight_decay: float = option(
        "not on norms and biases, default 0.05", NUMBERS, 0.05, read=not_negative, metavar="W"
    )
    layer_decay: float | None = option(
        "of the rate, from each layer to the one before it, as in 0.75; default: none",
        NUMBERS, read=fraction, metavar="D",
    )  # fmt: skip
    sched: str = option(
        "timm's schedules, a step at a time: cosine (default), tanh, poly, step, multistep",
        NUMBERS, "cosine", choices=SCHEDULES,
    )  # fmt: skip
    warmup_epochs: float = option(
        "linear warm-up before the schedule, default 2", NUMBERS, 2.0, read=not_negative,
        metavar="E",
    )  # fmt: skip
    min_lr: float = option(
        "end of cosine, tanh and poly, default 1e-5", NUMBERS, 1e-5, read=not_negative,
        metavar="RATE",
    )  # fmt: skip
    decay_epochs: float = option(
        "between the steps of --sched step, default 30", NUMBERS, 30.0, read=above_zero,
        metavar="E",
    )  # fmt: skip
    decay_milestones: tuple[int, ...] = option(
        "epochs at which --sched multistep steps, default 10,20", NUMBERS, (10, 20), read=naturals,
        metavar="E,...",
    )  # fmt: skip
    decay_rate: float | None = option(
        "of step and multistep, default 0.1; the power of poly, default 1",
        NUMBERS, read=above_zero, metavar="R",
    )  # fmt: skip
    clip_grad: float | None = option(
        "clip the global gradient norm; default: no clipping",
        NUMBERS, read=above_zero, metavar="NORM",
    )  # fmt: skip
    model_ema: bool = option(
        "also keep an exponential moving average of the parameters, evaluated beside them",
        NUMBERS, False,
    )  # fmt: skip
    model_ema_decay: float = option(
        "of it, a step, default 0.9998", NUMBERS, 0.9998, read=fraction, metavar="D"
    )
    model_ema_warmup: bool = option("less decay in its first steps", NUMBERS, False)
    # A rank's own is among its facts, of which a speed and a plan are.
    precision: PerRank[str] = option(
        "auto (default), fp32, tf32, bf16, fp16; one for all or one a rank",
        NUMBERS, read_precisions("auto"), read=read_precisions, metavar="P[,P...]",
        cell="precision", usual="auto (default), fp32, bf16, ...; or one a rank",
    )  # fmt: skip
    loss_scale: str | float = option(
        "shared by all ranks. auto (default): found on the first batches, 1 where no rank computes "
        "in fp16; dynamic: from 2^16; a number: from there, as in 2^20",
        NUMBERS, "auto", read=read_loss_scale, metavar="auto|dynamic|NUMBER",
    )  # fmt: skip
    seed: int = option("default 0", NUMBERS, 0, read=natural, metavar="N", cell="nothing")
