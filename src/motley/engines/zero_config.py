"""The reader of DeepSpeed's JSON configuration, which is checked and completed from the plan.

DeepSpeed ignores a key that it does not know, so a misspelt key (``micro_batch_per_gpu``) silently
leads to the default. This module raises an error that names the nearest valid key.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley import PACKAGE
from motley.config.option import Decides, option
from motley.engines.strategies import check_offload
from motley.errors import MotleyError
from motley.plan.memory import STATE
from motley.text import did_you_mean

if TYPE_CHECKING:
    from motley.engines.protocol import EngineContext

STAGES = (0, 1, 2, 3)

# Keys that are filled in from the plan if the file has "auto".
_FILLED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")

# Numbers of elements that DeepSpeed sends at once. DeepSpeed allocates memory for them in every
# step, so the number is limited to the model's parameters, and to BUCKET.
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
BUCKET = 50_000_000  # numbers of a gradient

# Values of --offload, and the lowest stage at which DeepSpeed supports each.
OFFLOADS = {"optimizer": 1, "parameters": 3}

_WIRE = "communication_data_type"  # the key that --wire sets

# Further keys that the file may have, from DeepSpeed's documentation of its configuration.
_ALLOWED = (
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
    "sparse_gradients", "comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor",
    "activation_checkpointing", "aio", "data_types", "checkpoint", "compile", "log_level",
)  # fmt: skip

# Keys that the training loop owns, and the option that sets each.
_OWNED = {
    "train_batch_size": "--batch-size",
    "optimizer": "--opt, --lr and --weight-decay",
    "scheduler": "--lr, --warmup-epochs and --min-lr",
    "fp16": "--precision fp16",
    "bf16": "--precision bf16",
    "amp": "--precision",
    "torch_autocast": "--precision",
}


@dataclass(frozen=True)
class ZeroOptions:
    """Options of DeepSpeed"""

    # A plan depends on the traits of the stage, not on its number.
    stage: int | None = option(
        "ZeRO stage, default 0", Decides.NOTHING, read=int, choices=STAGES, cell="strategy",
        usual="what ranks share out: 0 (default) nothing, 3 all", per_launch=True,
    )  # fmt: skip
    deepspeed_config: str | None = option(
        "default: Motley's zero<stage>.json", Decides.PLAN, metavar="FILE", per_launch=True
    )
    offload: str = option(
        "keep in the host's memory: the optimizer (stage 1 to 3), or the parameters too (stage "
        "3); default: nothing",
        Decides.PLAN, "none", choices=("none", *OFFLOADS), per_launch=True,
    )  # fmt: skip


def config_path(options: ZeroOptions) -> Path:
    """Return the path in ``--deepspeed-config``, or the path of Motley's file for ``--stage``."""
    own = PACKAGE / "engines" / "zero_configs" / f"zero{options.stage or 0}.json"
    return Path(options.deepspeed_config or own)


def read_zero_config(path: Path, context: "EngineContext", parameters: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for this rank.

    Ranks may differ in micro-batch size and accumulation steps. DeepSpeed checks on each rank that
    ``train_batch_size`` = micro-batch x accumulation x ranks. The global batch size would fail this
    check, so the result has no ``train_batch_size``.

    Args:
        path: path of the JSON file. A value "auto" in the file is replaced by a value from the
            plan, the options or the model.
        context: plan, options and rank of this run.
        parameters: number of parameters in the model.

    Raises:
        MotleyError: the file is not JSON, has an unknown key, or has a value that contradicts the
            plan.
    """
    from motley.engines.import_deepspeed import DeepSpeedZeroConfig  # slow

    content = _read(path)
    _check_keys(path, content, (*_FILLED, *_ALLOWED), "")
    zero = content.setdefault("zero_optimization", {})
    known = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
    _check_keys(path, zero, known, "zero_optimization.")
    _offload(path, content, context)
    _check_stage(path, zero, context.config.group(ZeroOptions).stage)
    for key in _BUCKETS:
        if zero.get(key) == "auto":
            zero[key] = min(BUCKET, parameters + parameters % 2)  # DeepSpeed needs an even number
    _fill_sizes(path, content, context)
    _fill_wire(path, content, context)
    content.setdefault("steps_per_print", 10**9)
    return content


def _check_stage(path: Path, zero: Mapping[str, Any], asked: int | None) -> None:
    """Raise MotleyError if the file's stage contradicts ``--stage`` or the rest of the file."""
    if asked is not None and asked != zero.get("stage", 0):
        raise MotleyError(
            f"--stage {asked} contradicts {path}, which sets zero_optimization.stage "
            f"{zero.get('stage', 0)}; leave out one of them"
        )
    if zero.get("stage", 0) == 1 and zero.get("overlap_comm"):
        raise MotleyError(
            f"{path}: overlap_comm computes wrong results at stage 1, without an error, when "
            "ranks differ in precision; set it to false"
        )


def _fill_sizes(path: Path, content: dict[str, Any], context: "EngineContext") -> None:
    """Fill in the plan's batch sizes and the value of ``--clip-grad``.

    Raises:
        MotleyError: the file has a different value.
    """
    sizes = context.plan.micro_batches[context.rank]
    right = dict(
        zip(_FILLED, (max(1, *sizes), len(sizes), context.config.clip_grad or 0.0), strict=True)
    )
    for key, value in right.items():
        result = content.setdefault(key, "auto")
        if result not in ("auto", value):
            raise MotleyError(
                f"{path}: {key} is {result}, but the plan gives rank {context.rank} {value}; write "
                '"auto", or change --batch-size, --micro-batch or --clip-grad'
            )
        content[key] = value


def _fill_wire(path: Path, content: dict[str, Any], context: "EngineContext") -> None:
    """Fill in the dtype of ``--wire``.

    Raises:
        MotleyError: the file has a different dtype.
    """
    wire = context.plan.wire
    if content.setdefault(_WIRE, wire.dtype) not in ("auto", wire.dtype):
        raise MotleyError(
            f"{path}: {_WIRE} is {content[_WIRE]}, but the run has --wire {wire}; remove the key, "
            "or give --wire this type"
        )
    content[_WIRE] = wire.dtype
    if content["zero_optimization"].get("stage", 0) == 0:
        content["gradient_clipping"] = 0.0  # the engine clips; see motley.engines.zero_engine
        # In 16 bits, gradients are divided before the sum, which could overflow. The search for
        # the loss scale only considers what each rank sends.
        content.setdefault("prescale_gradients", wire.dtype != "fp32")


def _offload(path: Path, content: dict[str, Any], context: "EngineContext") -> None:
    """Fill in the state that ``--offload`` moves to the CPU.

    Raises:
        MotleyError: this stage or device cannot move the requested state to the CPU.
    """
    zero = content["zero_optimization"]
    what, stage = context.config.group(ZeroOptions).offload, zero.get("stage", 0)
    if what == "none":
        return
    check_offload(what, context)
    least = OFFLOADS[what]
    if stage < least:
        raise MotleyError(
            f"--offload {what}: DeepSpeed offloads the {what} only from stage {least} on; add "
            f"--stage {least}"
        )
    for each, key in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        if each == what or what == "parameters":  # "parameters" includes the optimizer
            if key in zero:
                raise MotleyError(
                    f"--offload {what} contradicts {path}, which sets {key}; leave out one of them"
                )
            zero[key] = {"device": "cpu", "pin_memory": True}
    content["zero_force_ds_cpu_optimizer"] = False  # --opt is torch's own


def read_stage(path: Path) -> int:
    """Return the ZeRO stage in a file.

    Raises:
        MotleyError: the file is not JSON, or its stage is not 0 to 3.
    """
    zero = _read(path).get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise MotleyError(f"{path}: zero_optimization is {zero}, and has to be a JSON object")
    stage = zero.get("stage", 0)
    if stage not in STAGES:
        raise MotleyError(f"{path}: zero_optimization.stage {stage} is not one of 0, 1, 2, 3")
    return int(stage)


def state_in_host(options: ZeroOptions) -> tuple[str, ...]:
    """Return the parts of the training state that are kept in host memory.

    The option ``--offload`` or DeepSpeed's configuration file selects these parts.
    """
    path = config_path(options)
    stage, zero = read_stage(path), _read(path).get("zero_optimization", {})
    result = {
        each: zero.get(key, {}).get("device", "none") != "none"
        for each, key in (("optimizer", "offload_optimizer"), ("parameters", "offload_param"))
    }
    parameters = options.offload == "parameters" or result["parameters"]
    if options.offload == "none" and not result["optimizer"]:
        return STATE[:1] if parameters else ()
    if parameters:
        return STATE
    return STATE[1:] if stage > 1 else STATE[2:]  # a whole gradient stays on the GPU


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MotleyError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(content, dict):
        raise MotleyError(f"{path} does not hold a JSON object")
    return content


def _check_keys(path: Path, found: Iterable[str], known: Iterable[str], where: str) -> None:
    known = tuple(known)
    for key in found:
        if not where and key in _OWNED:
            raise MotleyError(
                f"{path}: {_OWNED[key]} decides the key {key}; remove it from the file"
            )
        if key not in known:
            raise MotleyError(
                f"{path}: the key {where}{key} is unknown, or not supported by "
                f"Motley{did_you_mean(key, known)}"
            )
