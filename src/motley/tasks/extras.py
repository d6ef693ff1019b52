"""Packages that only some options need, and that a fresh environment does not have."""

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from motley.errors import MotleyError


def import_extra(name: str, option: str) -> ModuleType:
    """A package, imported when it is needed.

    Args:
        option: that needs it, for the error.

    Raises:
        MotleyError: it is not installed here, or cannot be imported.
    """
    # Nothing is ever fetched from a model hub: what is not in the user's folder is an error.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == name:
            raise MotleyError(_missing(name, option)) from None
        raise MotleyError(f"{option}: {name} imports {error.name}, which is missing") from None


def folder_of_extra(name: str, option: str) -> Path:
    """Where a package lies, of which only files are wanted: it is not imported, and need not have
    what it imports.

    Raises:
        MotleyError: it is not installed here.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise MotleyError(_missing(name, option))
    return Path(next(iter(spec.submodule_search_locations)))


def _missing(name: str, option: str) -> str:
    return (
        f"{option} needs the package {name}, which is not installed here; install it on all "
        f"hosts, as in: .venv/bin/pip install {name}"
    )
