"""The one place that imports DeepSpeed, and has it be quiet.

By itself it prints warnings on every rank that say nothing here, and on a CPU compiles, for half a
minute and with headers that a host may lack, what is for inference.

Importing this raises MotleyError where DeepSpeed is absent, or is one that trains wrong.
"""

import importlib.metadata
import logging
import os
import warnings
from typing import Any

import torch
from packaging.version import Version

from motley.errors import MotleyError

# Before, stage 3 over gloo waits for the last of the parameters that it gathers alone, and computes
# with what the others were; stages 1 to 3 do not look for overflow of fp32 gradients.
_LEAST = "0.19.8"
_INSTALL = f"install {_LEAST} or later on all hosts, as bash setup/install_cn.sh does"

try:  # not by importing it: a folder deepspeed/ beside the script would answer
    _installed = importlib.metadata.version("deepspeed")
except importlib.metadata.PackageNotFoundError:
    raise MotleyError(f"DeepSpeed is not installed here; {_INSTALL}") from None
if Version(_installed) < Version(_LEAST):
    raise MotleyError(
        f"DeepSpeed {_installed} is silently wrong in some steps (before {_LEAST} it does not wait "
        f"for all that it gathers); {_INSTALL}"
    )

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would warn that it guessed so
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "no CUDA"

import deepspeed as _deepspeed  # noqa: E402  # once it is known to be right
from deepspeed import comm, utils  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402

__all__ = ["DeepSpeedZeroConfig", "comm", "deepspeed", "utils"]

deepspeed: Any = _deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
utils.logger.setLevel(logging.ERROR)  # 40 lines a rank on its own configuration
# DeepSpeed calls functions that newer torch has renamed.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
