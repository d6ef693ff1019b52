"""The one place that imports DeepSpeed, and has it be quiet.

By itself it prints warnings on every rank that say nothing here, and on a CPU compiles, for half a
minute and with headers that a host may lack, what is for inference.
"""

import logging
import os
import warnings
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would warn that it guessed so
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "no CUDA"

import deepspeed as _deepspeed
from deepspeed import comm, utils
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

__all__ = ["DeepSpeedZeroConfig", "comm", "deepspeed", "utils"]

deepspeed: Any = _deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
utils.logger.setLevel(logging.ERROR)  # 40 lines a rank on its own configuration
# It calls what newer torch has another name for.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
