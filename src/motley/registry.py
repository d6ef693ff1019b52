"""Registries of modules in packages, and imports of optional packages."""

import importlib
import importlib.util
import os
import pkgutil
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from motley.errors import MotleyError


def entries(
    package: str, name: str, is_entry: Callable[[object], bool], form: str, example: str
) -> list[Any]:
    """Return the items of the tuple ``name`` of every module in a package.

    The items are in the order of the modules' file names. A module that is added to the package is
    found without any other change.

    Args:
        package: full name of the package.
        name: name of the tuple.
        is_entry: function that returns True for an item that the registry can use.
        form: description of a valid item, for the error.
        example: name of a short module of the package, for the error.

    Raises:
        MotleyError: a module cannot be imported, or has no such tuple.
    """
    result: list[Any] = []
    folder = Path(importlib.import_module(package).__path__[0])
    for module in pkgutil.iter_modules([str(folder)]):
        path = folder / f"{module.name}.py"
        listed = getattr(_import_entry(f"{package}.{module.name}", path), name, None)
        if not (isinstance(listed, tuple) and all(map(is_entry, listed))):
            raise MotleyError(
                f"{path}: {name} has to be a tuple of {form}; {folder / example}.py is a complete "
                "example"
            )
        result += listed
    return result


def is_subclass(item: object, kind: type) -> bool:
    """Return True if an item is a class that is derived from ``kind``."""
    return isinstance(item, type) and issubclass(item, kind)


def _import_entry(module: str, path: Path) -> ModuleType:
    """Import a module of a registry. Convert an error in its code to a MotleyError."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            number, text = error.lineno, error.msg
        elif place.filename == str(path):
            number, text = place.lineno, str(error)
        else:
            raise
        raise MotleyError(f"{path}, line {number}: {type(error).__name__}: {text}") from error


_ON_ALL = " on all hosts"


def import_extra(name: str, option: str, packages: str = "", where: str = _ON_ALL) -> ModuleType:
    """Import a module of an optional package, and return it.

    Args:
        name: name of the module.
        option: option that needs the module, for the error.
        packages: packages to install with pip; empty: a package of the module's name.
        where: part of the error message that names the hosts on which to install the packages.

    Raises:
        MotleyError: the module is not installed on this host, or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if _root(str(error.name)) in {_root(name), *packages.split()}:
            raise MotleyError(_missing(packages or name, option, where)) from None
        raise MotleyError(
            f"{option}: {name} imports {error.name}, which is not installed"
        ) from None
    except ImportError as error:
        raise MotleyError(f"{option}: {name} cannot be imported: {error}") from None


# The user's own wish, as this process began: import_offline() sets the variable later.
ASKED_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def import_offline(name: str, option: str) -> ModuleType:
    """Import a package of Hugging Face in offline mode, without access to their hub.

    See :func:`import_extra`.

    The package then raises an error for a missing file, instead of downloading it.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return import_extra(name, option)


def check_extras(names: Sequence[str], option: str) -> None:
    """Raise MotleyError if packages are not installed. The message names all of them.

    Args:
        names: names of the packages.
        option: option that needs the packages, for the error.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MotleyError(_missing(" ".join(missing), option))


def folder_of_extra(name: str, option: str) -> Path:
    """Return the folder of a package without importing it, since only its files are needed.

    Raises:
        MotleyError: the package is not installed on this host.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise MotleyError(_missing(name, option))
    return Path(next(iter(spec.submodule_search_locations)))


def _root(module: str) -> str:
    return module.partition(".")[0]


def _missing(packages: str, option: str, where: str = _ON_ALL) -> str:
    return (
        f"{option} needs a package that is not installed; install it{where}, as in: "
        f".venv/bin/pip install {packages}"
    )
