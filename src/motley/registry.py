"""Finds what can be added by one file: every module of a package says what it adds."""

import importlib
import pkgutil
from typing import Any


def entries(package: str, name: str) -> list[Any]:
    """All that the modules of a package list under ``name``, in the order of their files' names.

    A file that is put into the package is found; nothing else needs to know of it.

    Raises:
        TypeError: a module has no such list.
    """
    found: list[Any] = []
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        content = importlib.import_module(f"{package}.{module.name}")
        if not isinstance(listed := getattr(content, name, None), tuple):
            raise TypeError(f"{content.__file__} needs a tuple {name} of what it adds")
        found += listed
    return found
