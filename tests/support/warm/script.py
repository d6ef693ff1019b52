"""A rank that runs a script, as ``mpirun ... ./entry_cn.sh SCRIPT.py ARGS...`` begins one."""

import os
import runpy
import sys
from typing import Any

from project import ROOT

import motley.launch.world
from motley.launch.mpi import Launched

# What a rank imports sooner or later; DeepSpeed's Muon takes torch's compiler with it, 6 s.
MODULES = (
    "warm.script",
    "motley.train.loop",
    "motley.engines.ddp",
    "motley.engines.fsdp",
    "motley.engines.local_sgd",
    "motley.engines.zero_engine",
    "sklearn.datasets",
    "sklearn.datasets.data",
    "sklearn.datasets.descr",
    "sklearn.model_selection",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "jinja2.ext",
)


def main(launched: Launched, words: list[Any]) -> None:
    """Run a script with its options, in the repository's root."""
    os.chdir(ROOT)
    script, *_ = sys.argv = words
    sys.path.insert(0, str((ROOT / script).parent))
    motley.launch.world.MpiRanks = lambda: launched  # type: ignore[assignment, misc]
    runpy.run_path(script, run_name="__main__")
