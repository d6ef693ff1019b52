"""Import before deepspeed: without it every rank prints warnings that say nothing here."""

import logging
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would warn that it guessed so
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "no CUDA"

from deepspeed.utils import logger

logger.setLevel(logging.ERROR)  # 40 lines a rank on its own configuration
