"""Thin bridges from other training frameworks to the lab: transformers, Accelerate, Lightning.

Each module imports its framework, and ``motley`` imports none of these modules by itself.
"""

from pathlib import Path
from typing import Any

from motley.comm.collectives import all_gather_object
from motley.errors import MotleyError
from motley.library import lab as library


def get_lab(caller: str) -> library.Lab:
    """Return the lab that this process has joined.

    Args:
        caller: name of the class or function that needs it, for the error.

    Raises:
        MotleyError: the script has not called ``motley.join()``.
    """
    if library._lab is None:
        raise MotleyError(
            f"{caller} was made before the ranks were connected: write `lab = motley.join()` at "
            "the top of the script, before the arguments and the model are made"
        )
    return library._lab


def check_folder(lab: library.Lab, folder: Any) -> None:
    """Raise MotleyError if a checkpoint is missing on the host of any rank; all ranks call it."""
    present = all_gather_object(Path(folder).is_dir())
    missing = [name for name, here in zip(lab._names, present, strict=True) if not here]
    if missing:
        raise MotleyError(
            f"the checkpoint {folder} is missing for {', '.join(missing)}: copy it with "
            f"`rsync -aR {folder} HOST:/`, or save checkpoints to a folder that all hosts share"
        )
