"""The import of DeepSpeed without its messages. No other module imports DeepSpeed.

By default DeepSpeed prints warnings on every rank that do not apply to Motley. On a CPU, DeepSpeed
also compiles code for inference. The compilation takes half a minute, and needs headers that a host
may lack.

Importing this module raises MotleyError if DeepSpeed is not installed, or if its version is known
to train wrongly.
"""

import importlib.metadata
import logging
import os
import warnings
from typing import Any

import torch
from packaging.version import Version

from motley.errors import MotleyError

# In earlier versions, stage 3 over gloo waits only for the last parameter that it gathers, and
# computes with old values of the others. Stages 1 to 3 do not detect overflow of fp32 gradients.
_LEAST = "0.19.8"
_INSTALL = f"install {_LEAST} or later on all hosts, as bash setup/install_cn.sh does"

try:  # an import might find a folder deepspeed/ beside the script
    _installed = importlib.metadata.version("deepspeed")
except importlib.metadata.PackageNotFoundError:
    raise MotleyError(f"DeepSpeed is not installed here; {_INSTALL}") from None
if Version(_installed) < Version(_LEAST):
    raise MotleyError(
        f"DeepSpeed {_installed} computes wrong results in some steps, without an error (versions "
        f"before {_LEAST} do not wait for all parameters that they gather); {_INSTALL}"
    )

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it DeepSpeed warns of a guess
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "no CUDA"

import deepspeed as _deepspeed  # noqa: E402  # after the check of its version
from deepspeed import comm, utils  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402

__all__ = ["DeepSpeedZeroConfig", "comm", "deepspeed", "utils"]

deepspeed: Any = _deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
utils.logger.setLevel(logging.ERROR)  # 40 lines per rank about its configuration
# DeepSpeed calls functions that newer torch has renamed.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
