"""The options of the training scripts, with timm's names where timm has one.

A group is a dataclass, and each of its fields is an option. The docstring of a group is the group's
title in ``-h``. A strategy declares a group of its own options in its file
(motley.engines.strategies). A task is a group of options, too (motley.tasks). The values of
``--wire`` are registered in motley.comm.modes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from motley.config.option import (
    NONE,
    SLOWEST,
    Decides,
    Duration,
    Keyword,
    Metric,
    Option,
    StepSpan,
    above_zero,
    batch_size,
    fraction,
    get_options,
    keyword,
    metric,
    names,
    natural,
    naturals,
    noise_part,
    not_negative,
    option,
    positive,
    profiled,
    rate_or_part,
    step_span,
    steps_or_time,
)
from motley.plan.precision import (
    PerRank,
    read_loss_scale,
    read_micro_batches,
    read_named_hosts,
    read_precisions,
    read_shares,
)
from motley.plan.wire import WireMode

MODEL, NUMBERS, SPEED, PLAN, NOTHING = (
    Decides.MODEL, Decides.NUMBERS, Decides.SPEED, Decides.PLAN, Decides.NOTHING,
)  # fmt: skip
SCHEDULES = ("cosine", "tanh", "poly", "step", "multistep")
CLIP_MODES = ("norm", "value", "agc")


@dataclass(frozen=True)
class OptimizationOptions:
    """Options of the optimization"""

    opt: str = option(
        "timm name, default adamw; adamw8bit: its moments take a quarter of the memory",
        MODEL | SPEED, "adamw", metavar="NAME",
    )  # fmt: skip
    lr: float = option(
        "learning rate at the top of the schedule, default 1e-3",
        NUMBERS, 1e-3, read=above_zero, metavar="RATE",
        usual="rate at the top of the schedule, default 1e-3",
    )  # fmt: skip
    opt_kwargs: tuple[Keyword, ...] | None = option(
        "further arguments of the optimizer, as in betas=0.9,0.95 eps=1e-8; default: its own (text "
        "with Adam: betas=0.9,0.95)",
        NUMBERS | SPEED, read=keyword, metavar="NAME=VALUE", several=True,
    )  # fmt: skip
    momentum: float | None = option(
        "for optimizers that have a momentum, such as sgd; default 0.9",
        NUMBERS,
        read=fraction,
        metavar="M",
    )
    weight_decay: float = option(
        "applied to all parameters but norms and biases, default 0.05",
        NUMBERS,
        0.05,
        read=not_negative,
        metavar="W",
    )
    weight_decay_end: float | None = option(
        "final value of the weight decay, which follows a cosine to it; default: the decay is "
        "constant",
        NUMBERS, read=not_negative, metavar="W",
    )  # fmt: skip
    layer_decay: float | None = option(
        "factor of the learning rate from each layer to the one before it, as in 0.75; default: "
        "none",
        NUMBERS, read=fraction, metavar="D",
    )  # fmt: skip
    sched: str = option(
        "schedule of timm, applied at each step: cosine (default), tanh, poly, step, multistep",
        NUMBERS, "cosine", choices=SCHEDULES,
    )  # fmt: skip
    warmup_epochs: float = option(
        "linear warm-up before the schedule, default 2", NUMBERS, 2.0, read=not_negative,
        metavar="E",
    )  # fmt: skip
    warmup_steps: int | None = option(
        "linear warm-up in steps, instead of --warmup-epochs; default: none (text: 100 steps, "
        "but at most a tenth of the run)",
        NUMBERS, read=natural, metavar="K",
    )  # fmt: skip
    warmup_lr: float | None = option(
        "learning rate of the first step of the warm-up; default: --lr divided by the steps of "
        "the warm-up plus one",
        NUMBERS, read=not_negative, metavar="RATE",
    )  # fmt: skip
    lr_noise: tuple[float, ...] | None = option(
        "first part of the epochs whose rate has noise, and the part at which that ends; default: "
        "no noise",
        NUMBERS, read=fraction, metavar="PART", several=True,
    )  # fmt: skip
    lr_noise_pct: float = option(
        "largest noise as a part of the rate, default 0.67",
        NUMBERS, 0.67, read=noise_part, metavar="PART",
    )  # fmt: skip
    min_lr: float = option(
        "final learning rate of cosine, tanh and poly, as a number or in percent of --lr; "
        "default 1e-5 (text: a tenth of --lr)",
        NUMBERS, 1e-5, read=rate_or_part, metavar="RATE",
    )  # fmt: skip
    lr_cycle_limit: int = option(
        "number of cycles of cosine, tanh and poly, which together take the whole run, default 1 "
        "(timm's --epochs is the first cycle alone)",
        NUMBERS, 1, read=positive, metavar="N",
    )  # fmt: skip
    lr_cycle_mul: float = option(
        "length of each cycle, as a multiple of the one before, default 1",
        NUMBERS, 1.0, read=above_zero,
        metavar="X",
    )  # fmt: skip
    lr_cycle_decay: float = option(
        "top of each cycle, as a multiple of the one before, default 0.5",
        NUMBERS, 0.5, read=fraction,
        metavar="D",
    )  # fmt: skip
    decay_epochs: float = option(
        "epochs between the steps of --sched step, default 30", NUMBERS, 30.0, read=above_zero,
        metavar="E",
    )  # fmt: skip
    decay_milestones: tuple[int, ...] = option(
        "epochs at which --sched multistep lowers the rate, default 10,20",
        NUMBERS, (10, 20), read=naturals,
        metavar="E,...",
    )  # fmt: skip
    decay_rate: float | None = option(
        "factor of each step of step and multistep, default 0.1; the power of poly, default 1",
        NUMBERS, read=above_zero, metavar="R",
    )  # fmt: skip
    clip_grad: float | None = option(
        "clip the global gradient norm; default: no clipping",
        NUMBERS, read=above_zero, metavar="NORM",
    )  # fmt: skip
    clip_mode: str = option(
        "what --clip-grad limits: norm (default), the norm of the whole gradient; value, each "
        "number; agc, the norm of each row relative to the norm of its weights (adaptive "
        "clipping)",
        NUMBERS, "norm", choices=CLIP_MODES,
    )  # fmt: skip
    model_ema: bool = option(
        "also keep an exponential moving average of the parameters, evaluated beside them",
        NUMBERS, False,
    )  # fmt: skip
    model_ema_decay: float = option(
        "decay of the average per step, default 0.9998", NUMBERS, 0.9998, read=fraction, metavar="D"
    )
    model_ema_warmup: bool = option("let the average decay less in the first steps", NUMBERS, False)
    # Not SPEED or PLAN: each rank's precision is among its facts, which a speed and a plan include.
    precision: PerRank[str] = option(
        "auto (default), fp32, tf32, bf16 or fp16; one for all ranks, or one per rank",
        NUMBERS, read_precisions("auto"), read=read_precisions, metavar="P[,P...]",
        cell="precision", usual="auto (default), fp32, bf16, ...; or one per rank",
    )  # fmt: skip
    loss_scale: str | float = option(
        "loss scale, which all ranks share. auto (default): found on the first batches, and 1 if "
        "no rank computes in fp16; dynamic: starts at 2^16; a number: starts there, as in 2^20",
        NUMBERS, "auto", read=read_loss_scale, metavar="auto|dynamic|NUMBER",
    )  # fmt: skip
    seed: int = option("default 0", NUMBERS, 0, read=natural, metavar="N", cell="nothing")


# Factor of the learning rate: (batch / largest batch) to this power.
RAMP_POWERS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
ATTENTION = ("auto", "fused", "efficient", "plain")
Group = TypeVar("Group")


@dataclass(frozen=True)
class ModelOptions:
    """Options of the model"""

    task: str = option(  # the task's identity() is compared instead
        "", NOTHING, "image", metavar="NAME|FILE.py",
        usual="image (default), text, weather, or your own", per_launch=True,
    )  # fmt: skip
    build: str = option(
        "how a model gets its initial values: whole, on each rank; blocks, one block after "
        "another, each of which --strategy fsdp shards before the next, so no rank holds the "
        "whole model; auto (default): blocks if more than a billion parameters start with random "
        "values",
        NUMBERS | SPEED, "auto", choices=("auto", "whole", "blocks"), per_launch=True,
    )  # fmt: skip
    compile: str = option(
        "torch.compile the model, block by block: auto (default), if it will save a GPU more of "
        "the run than it takes; on, also if no value is given; off",
        SPEED, "auto", choices=("auto", "on", "off"), bare="on", per_launch=True,
    )  # fmt: skip
    grad_checkpointing: tuple[str, ...] | None = option(
        "compute activations again in the backward pass instead of keeping them, which takes "
        "less memory and up to a third more time: in all blocks, or in the modules of these "
        "names, as in mlp,blocks.0.attn; default: nowhere",
        SPEED, read=names, metavar="NAME,...", bare=("blocks",), cell="checkpointing",
    )  # fmt: skip
    attention: str = option(
        "attention kernels of torch: fused (flash, 16 bits on a GPU), efficient "
        "(memory-efficient, GPUs alone), or plain, each product written out; auto (default): "
        "torch chooses",
        SPEED, "auto", choices=ATTENTION, per_launch=True,
    )  # fmt: skip
    initial_checkpoint: str | None = option(
        "start with the weights of a run, of a file of safetensors, or of local-dir:FOLDER of "
        "timm or Hugging Face; a head of another shape gets new random weights",
        NOTHING, metavar="RUN|FILE", per_launch=True,
    )  # fmt: skip
    trust: bool = option(
        "also read initial weights from a pickle; only tensors are read, and no code is run",
        NOTHING, False, per_launch=True,
    )  # fmt: skip
    freeze: tuple[str, ...] | None = option(
        "do not train these parts, named by path or by its last word; backbone: all but the "
        "head. They are not sent either",
        MODEL | SPEED, read=names, metavar="NAME,...|backbone",
    )  # fmt: skip


@dataclass(frozen=True)
class DataOptions:
    """Options of the data"""

    data_fraction: float = option(
        "train on this part of the training set (weak scaling), default 1",
        NUMBERS, 1.0, read=fraction, metavar="F", cell="fraction",
    )  # fmt: skip
    eval_samples: int | None = option(
        "evaluate on this number of held-out samples, default all",
        NUMBERS, read=positive, metavar="N", former="--eval-images",
    )  # fmt: skip
    bad_samples: str = option(
        "what a sample that cannot be read does: fail (default) ends the run; skip counts and "
        "names it, and takes the next one",
        NUMBERS, "fail", choices=("fail", "skip"), former="--bad-images",
    )  # fmt: skip
    workers: int | None = option(
        "loader processes per rank; default: 0 for CPU ranks and for data in memory, otherwise "
        "as many as keep the GPU busy, as measured, and as the host has cores for",
        NOTHING, read=natural, metavar="N", short="-j", per_launch=True,
    )  # fmt: skip


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of the evaluation"""

    eval_every: int | Duration | None = option(
        "steps, or a time such as 10m, between evaluations of the held-out samples; default: one "
        "per epoch. The run also ends with an evaluation",
        NOTHING, read=steps_or_time, metavar="K|TIME",
        usual="steps, or 10m, between evaluations; default: an epoch",
    )  # fmt: skip
    eval_at_start: bool = option(
        "also evaluate before the first step, or a finished run again",
        NOTHING,
        False,
    )
    keep_best: Metric | None = option(
        "also keep the checkpoint with the best value of a metric, and link it as "
        "checkpoints/best. For a metric of your own, name the better direction, as in "
        "accuracy:max",
        NOTHING, read=metric, metavar="METRIC[:min|max]",
        usual="keep the best checkpoint too, by a metric, as loss",
    )  # fmt: skip
    worst: int = option(
        "number of held-out samples with the largest loss that each evaluation writes into "
        "worst.json, with small pictures, for the report; default 24, at most 200, 0 for none",
        NOTHING, 24, read=natural, metavar="N",
    )  # fmt: skip
    stop_after: int | None = option(
        "end the run after K evaluations in a row without a better value of the metric of "
        "--keep-best, or of the loss without that option; default: no early end",
        NOTHING, read=positive, metavar="K",
    )  # fmt: skip


@dataclass(frozen=True)
class BatchOptions:
    """Options of the batch and of the length of the run"""

    batch_size: int = option(
        "GLOBAL batch: samples of all ranks in one optimizer step, default 128; 512:2048:32/100M "
        "raises it from 512 to 2048 in steps of 32 over the first 100 million samples",
        NUMBERS | SPEED, 128, read=batch_size, metavar="N|RAMP", short="-b", cell="batch",
        usual="samples per step, over all ranks, default 128",
    )  # fmt: skip
    ramp_lr: str = option(
        "how the learning rate grows with a growing batch: none (default), linear, sqrt",
        NUMBERS, "none", choices=tuple(RAMP_POWERS),
    )  # fmt: skip
    micro_batch: PerRank[int] | None = option(
        "most samples that a rank computes at once, one number for all ranks or one per rank; "
        "default: the fastest that fits, or with --shares the whole share",
        PLAN, read=read_micro_batches, metavar="M[,M...]", per_launch=True,
    )  # fmt: skip
    shares: PerRank[float] | None = option(
        "shares of the ranks in the batch, as in 5,4,3,2,1, or equal; default: by measured speed",
        PLAN, read=read_shares, metavar="S,S,...|equal",
        usual="ranks' shares, as 5,4,3; default: by measured speed", per_launch=True,
    )  # fmt: skip
    replan: str = option(
        "auto (default): split the batch again when ranks become slower or faster during the "
        "run, but not with fsdp or ZeRO 2 and 3, where every pass waits for all ranks; the "
        "global batch never changes",
        NOTHING, "auto", choices=("auto", "off"), per_launch=True,
    )  # fmt: skip
    hosts: str | tuple[str, ...] = option(
        "hosts that train: auto (default) leaves out hosts without which a step is shorter, but "
        "none with --shares; all; or these hosts alone",
        PLAN, "auto", read=read_named_hosts, metavar="auto|all|NAME,...",
        usual="auto (default) leaves out hosts that slow the others", per_launch=True,
    )  # fmt: skip
    bind: bool = option(
        "let ranks run on any core; default: on the cores next to their GPU, if a machine has "
        "several memory nodes and no other program has chosen cores",
        SPEED, True, per_launch=True,
    )  # fmt: skip
    wire: WireMode | None = option(  # its modes are registered
        "", NUMBERS | PLAN, unset="auto", usual="what is sent between hosts, default auto"
    )
    epochs: int = option(
        "number of epochs, default 30", NUMBERS, 30, read=positive, metavar="E", usual="default 30"
    )
    max_steps: int | None = option(
        "stop after K steps; without --epochs, the learning-rate schedule ends there too",
        NOTHING, read=positive, metavar="K", cell="--steps, before the --,",
        usual="stop after so many",
    )  # fmt: skip


@dataclass(frozen=True)
class RecordOptions:
    """Options of the records"""

    run: str | None = option(
        "the run's folder is LOGS/NAME; default: the time", NOTHING, metavar="NAME", cell="nothing",
        usual="its folder is logs/NAME, default: the time", per_launch=True,
    )  # fmt: skip
    logs: str = option(
        "default: logs", NOTHING, "logs", metavar="DIR", cell="--out", per_launch=True
    )
    resume: str | None = option(
        "continue from a checkpoint or a run folder; auto, also if no value is given: the run of "
        "--run NAME, or the newest unfinished run that has a checkpoint",
        NOTHING, metavar="PATH|auto", bare="auto", cell="nothing",
        usual="continue a run; auto: that of --run, or the newest", per_launch=True,
    )  # fmt: skip
    save_every: int | Duration | None = option(
        "steps, or a time such as 10m, between checkpoints; default: one per epoch, none for "
        "noise",
        NOTHING, read=steps_or_time, metavar="K|TIME",
        usual="steps, or 10m, between checkpoints",
    )  # fmt: skip
    keep: int = option("checkpoints kept, default 2", NOTHING, 2, read=positive, metavar="N")
    log_interval: float = option(
        "seconds between progress lines outside of a terminal, default 2",
        NOTHING, 2.0, read=above_zero, metavar="SECONDS", per_launch=True,
    )  # fmt: skip
    gpu_log_interval: float = option(
        "seconds between samples of the GPU log, default 2",
        NOTHING, 2.0, read=above_zero, metavar="SECONDS", per_launch=True,
    )  # fmt: skip
    profile: StepSpan | None = option(
        "profile these steps with torch's profiler, as in 20:40 for steps 21 to 40; see "
        "plots/traces.py",
        NOTHING, read=step_span, metavar="FROM:TO", per_launch=True,
    )  # fmt: skip
    profile_ranks: str | tuple[int, ...] = option(
        "ranks that the profiler records: slowest (default), all, or these",
        NOTHING, SLOWEST, read=profiled, metavar="slowest|all|R,...", per_launch=True,
    )  # fmt: skip


_NAME_A_RUN = ("run", "resume")
GROUPS = (
    ModelOptions, DataOptions, BatchOptions, OptimizationOptions, EvaluationOptions, RecordOptions,
)  # fmt: skip


@dataclass(frozen=True)
class Config(
    RecordOptions, EvaluationOptions, OptimizationOptions, BatchOptions, DataOptions, ModelOptions
):
    """The options of a run. If the value of a field is None, the option's help names the default.

    Attributes:
        own: groups of options of the chosen script's strategies, and the task.
        typed_names: names of the options that the user typed, in this launch or in launches that
            this launch continues.
        continued_names: the names in ``typed_names`` that the user typed only in earlier launches.
        recipe_names: names of the options that ``--recipe`` set, and the user did not type.
    """

    own: tuple[Any, ...] = ()
    typed_names: frozenset[str] = field(default=frozenset(), compare=False)
    continued_names: frozenset[str] = field(default=frozenset(), compare=False)
    recipe_names: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def schedule_ends_with_run(self) -> bool:
        """True if the schedule ends at ``--max-steps``, because ``--epochs`` was not given."""
        return self.max_steps is not None and "epochs" not in self.typed_names | self.recipe_names

    def group(self, group: type[Group]) -> Group:
        """Return the options of a group. If the script lacks the group, return its defaults."""
        return next((each for each in self.own if isinstance(each, group)), group())

    def options(self) -> Iterator[tuple[str, Option, Any]]:
        """Yield the name, declaration and value of each option, in the order of ``-h``."""
        for group in (*GROUPS, *map(type, self.own)):
            source = self if group in GROUPS else self.group(group)
            for attribute, declared in get_options(group).items():
                yield declared.name, declared, getattr(source, attribute)

    def as_toml(self) -> str:
        """Return the options that the user typed, in the form that ``--config`` reads.

        Options that identify this run, such as its name, are left out.
        """
        import tomli_w

        typed = {
            name: declared.to_text(value) for name, declared, value in self.options()
            if name in self.typed_names and name not in _NAME_A_RUN
        }  # fmt: skip
        return tomli_w.dumps({
            name: NONE if text is None else text for name, text in typed.items()
        })  # fmt: skip

    def as_json(self, decides: Decides | None = None) -> dict[str, Any]:
        """Return the options by name, in the form that records and checkpoints store.

        Args:
            decides: return only options that have one of these effects; None: return all options.
        """
        return {
            name: declared.to_text(value)
            for name, declared, value in self.options()
            if decides is None or declared.decides & decides
        }
