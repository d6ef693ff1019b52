"""Import before deepspeed: without it every rank prints warnings that say nothing here, and on
a CPU compiles, for half a minute and with headers that a host may lack, what is for inference.
"""

import logging
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would warn that it guessed so
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "no CUDA"

import deepspeed
from deepspeed.utils import logger

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logger.setLevel(logging.ERROR)  # 40 lines a rank on its own configuration
