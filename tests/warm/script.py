"""A rank that runs a script, as ``mpirun ... ./entry_cn.sh SCRIPT.py ARGS...`` begins one."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import motley.launch
from motley.launch import Launched

ROOT = Path(__file__).resolve().parents[2]
# What a rank imports sooner or later; DeepSpeed's Muon takes torch's compiler with it, 6 s.
MODULES = (
    "warm.script",
    "motley.train",
    "torch_engines",
    "zero_engine",
    "sklearn.datasets",
    "sklearn.datasets.data",
    "sklearn.datasets.descr",
    "sklearn.model_selection",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "jinja2.ext",
)


def main(launched: Launched, argument: dict[str, Any]) -> None:
    """Run ``argument["words"]``, the script and its options, in the repository's root."""
    os.environ |= argument["environment"]
    os.chdir(ROOT)
    script, *_ = sys.argv = argument["words"]
    sys.path.insert(0, str((ROOT / script).parent))
    motley.launch.MpiRanks = lambda: launched  # type: ignore[assignment, misc]
    runpy.run_path(script, run_name="__main__")
