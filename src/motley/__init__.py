"""Motley trains one model on unequal machines, with the result of one machine.

The names below are the public API. Each is imported when it is first used: ``import motley`` loads
neither torch nor MPI.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from motley import records
    from motley.errors import MotleyError
    from motley.library.join import join
    from motley.library.lab import Lab as Lab
    from motley.tasks.task import Task
    from motley.train.plan_vit import plan_shares
    from motley.train.train_model import train_model

__all__ = ["MotleyError", "Task", "join", "plan_shares", "records", "train_model"]

PACKAGE = Path(__file__).resolve().parent
# The clone that has the package, with scripts and the files beside them. None: pip installed it.
ROOT = PACKAGE.parents[1] if (PACKAGE.parents[1] / "entry_cn.sh").is_file() else None
__version__ = "0.1.0"
_MODULES = {
    "Lab": "motley.library.lab", "MotleyError": "motley.errors", "Task": "motley.tasks.task",
    "join": "motley.library.join",
    "plan_shares": "motley.train.plan_vit", "train_model": "motley.train.train_model",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, and return its value."""
    if name == "records":
        return importlib.import_module("motley.records")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
