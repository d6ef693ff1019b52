"""Registries of modules in packages, and imports of optional packages."""

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
    """Return the items of the tuple ``name`` of every module in a package.

    The items are in the order of the modules' file names. A module that is added to the package is
    found without any other change.

    Args:
        package: full name of the package.
        name: name of the tuple.

    Raises:
        TypeError: a module has no such tuple.
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
    """Import a module of an optional package, and return it.

    Args:
        name: name of the module.
        option: option that needs the module, for the error.
        packages: packages to install with pip; empty: the module's name.
        where: words on the place of the installation.

    Raises:
        MotleyError: the module is not installed here, or cannot be imported.
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
    """Import a package that would contact a model hub, and prevent that; see :func:`import_extra`.

    A file that is not in the user's folder is therefore an error, and is not downloaded.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return import_extra(name, option)


def check_extras(names: Sequence[str], option: str) -> None:
    """Raise MotleyError that names all packages that are not installed, before work starts.

    Args:
        names: names of the packages.
        option: option that needs them, for the error.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MotleyError(_missing(" ".join(missing), option))


def folder_of_extra(name: str, option: str) -> Path:
    """Return the folder of a package without importing it, since only its files are needed.

    Raises:
        MotleyError: the package is not installed here.
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
