"""Parts that one file adds, and packages that only some options need."""

import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from motley.errors import MotleyError


def entries(package: str, name: str) -> list[Any]:
    """All that the modules of a package list under ``name``, in the order of their files' names.

    A file that is put into the package is found; nothing else needs to know of it.

    Raises:
        TypeError: a module has no such list.
    """
    result: list[Any] = []
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        content = importlib.import_module(f"{package}.{module.name}")
        if not isinstance(listed := getattr(content, name, None), tuple):
            raise TypeError(f"{content.__file__} needs a tuple {name} of what it adds")
        result += listed
    return result


_ON_ALL = " on all hosts"


def import_extra(name: str, option: str, packages: str = "", where: str = _ON_ALL) -> ModuleType:
    """Return a module, imported when it is needed.

    Args:
        name: of the module.
        option: that needs it, for the error.
        packages: what pip calls it, and what else is needed with it; empty: the module's name.
        where: to install it.

    Raises:
        MotleyError: it is not installed here, or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if _root(str(error.name)) in {_root(name), *packages.split()}:
            raise MotleyError(_missing(packages or name, option, where)) from None
        raise MotleyError(f"{option}: {name} imports {error.name}, which is missing") from None
    except ImportError as error:
        raise MotleyError(f"{option}: {name} cannot be imported: {error}") from None


def import_offline(name: str, option: str) -> ModuleType:
    """Import a package that would ask a model hub, as :func:`import_extra` does, without the hub.

    Nothing is ever fetched from there: a file that is not in the user's folder is an error.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return import_extra(name, option)


def check_extras(names: Sequence[str], option: str) -> None:
    """Before work starts that imports them.

    Raises:
        MotleyError: names all that are not installed here.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MotleyError(_missing(" ".join(missing), option))


def folder_of_extra(name: str, option: str) -> Path:
    """Return the folder of a package without importing it, since only its files are wanted.

    Raises:
        MotleyError: it is not installed here.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise MotleyError(_missing(name, option))
    return Path(next(iter(spec.submodule_search_locations)))


def _root(module: str) -> str:
    return module.partition(".")[0]


def _missing(packages: str, option: str, where: str = _ON_ALL) -> str:
    return (
        f"{option} needs what is not installed here; install it{where}, as in: "
        f".venv/bin/pip install {packages}"
    )
