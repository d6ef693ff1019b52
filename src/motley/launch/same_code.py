"""A check that all ranks run the same code.

Hosts with homes of their own may hold an edited file, an older commit or another package. Without
the check, these hosts would train another model without an error.

The comparison covers the files that change a rank's results, or its part in collectives. These are
Motley's own files, the script, the modules and settings beside it, the files that its options name,
and the packages below. Python's version is compared too: from 3.12 on, Python sums floats in
another way, so ranks would not compute the same plan. Builds of one release for another CUDA
(``2.14.0+cu126``) count as equal, because old GPUs need them.

A file or package that only some hosts have is not compared. If a needed file is missing, its import
fails at once, and the error names the file. If a file is left over from an older commit, no module
imports it. A registry is an exception: all files in this kind of folder are imported, and each adds
something, such as a dataset. If only some hosts have a file of a registry, the start fails.
"""

import functools
import hashlib
import importlib.metadata
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from motley import PACKAGE, ROOT
from motley.errors import MotleyError
from motley.text import name_some

# A rank's host; hashes of its files by name, as torch_dist/train_vit.py; releases of its packages
# by name. A tuple and no class, because an older or newer Motley has to read it too.
Code = tuple[str, dict[str, str], dict[str, str]]

_PACKAGES = ("torch", "torchvision", "timm", "opt-einsum", "numpy", "pillow", "scikit-learn")
_SUFFIXES = {".py", ".json", ".toml"}
# Each file here adds something by itself; see motley.registry.
_REGISTERED = tuple(
    f"src/motley/{folder}/" for folder in (
        "comm/modes", "data/datasets", "engines/optimizers", "engines/strategies", "tasks/builtin",
    )
)  # fmt: skip
_PLACES = {"site-packages", "dist-packages"}


def compare_code(
    host: str, allgather: Callable[[Any], list[Any]], packages: Sequence[str] = ()
) -> None:
    """Raise MotleyError unless all ranks run equal code; all ranks call this function.

    Ranks first exchange one hash each. Ranks send more only if the hashes differ, because large
    packets may not pass between all hosts.

    Args:
        host: name of this machine.
        allgather: function that gathers a value from every rank, by rank.
        packages: packages that the script needs, besides those that all scripts need.
    """
    own = read_code(host, packages=packages)
    mine = hashlib.sha256(repr([sorted(part.items()) for part in own[1:]]).encode()).hexdigest()
    result = allgather(mine)
    if not all(isinstance(each, str) for each in result):
        check_same([own if isinstance(each, str) else each for each in result])
    if len(set(result)) > 1:
        check_same(allgather(own))


def read_code(
    host: str, command: Sequence[str] | None = None, packages: Sequence[str] = ()
) -> Code:
    """Return the versions and file hashes of the code that this process runs, in about 20 ms.

    Args:
        host: name of this machine.
        command: path of the script and its command-line words; None: the command line of this
            process.
        packages: packages that the script needs, besides those that all scripts need.

    Raises:
        MotleyError: a file cannot be read.
    """
    script, *words = sys.argv if command is None else command
    try:
        files = {name: _digest(path) for name, path in _files(Path(script).resolve(), words)}
    except OSError as error:
        raise MotleyError(
            f"{host} cannot read {error.filename}: {error.strerror}; allow yourself to read the "
            "file, or copy it from the other hosts with: bash setup/sync_cn.sh"
        ) from None
    names = [*_PACKAGES, *packages]
    versions = {name: _release(result) for name in names if (result := version(name)) is not None}
    return host, files, {**versions, "Python": ".".join(map(str, sys.version_info[:2]))}


@functools.cache  # reading a package's metadata takes a millisecond
def version(package: str) -> str | None:
    """Return the version of an installed package, without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_same(found: Sequence[Any]) -> None:
    """Raise MotleyError unless all ranks run the same code.

    Args:
        found: result of :func:`read_code` on each rank, by rank. Any other value comes from a
            version of Motley that sends no :data:`Code`.
    """
    strange = [rank for rank, code in enumerate(found) if not _is_code(code)]
    if strange:
        ranks = f"rank{'s' if len(strange) > 1 else ''} {', '.join(map(str, strange))}"
        raise MotleyError(
            f"the hosts do not run the same code: {ranks} has another version of Motley; "
            + _fix("this machine's files")
        )
    hosts = [code[0] for code in found]
    if odd := _odd([code[1] for code in found]):
        ranks_odd = sorted({rank for ranks in odd.values() for rank in ranks})
        first = (
            "this machine's files"
            if 0 not in ranks_odd
            else ("the right files to this machine, then")
        )
        raise MotleyError(
            f"the hosts do not run the same code: on {_whose(ranks_odd, hosts)}, "
            f"these files differ from the other hosts': {name_some(list(odd))}; {_fix(first)}"
        )
    if extra := _find_extra([code[1] for code in found]):
        name, having = next(iter(extra.items()))
        more = f", and {len(extra) - 1} more," if len(extra) > 1 else ""
        raise MotleyError(
            f"the hosts do not run the same code: {name}{more} is on {_whose(having, hosts)} and "
            "not on the other hosts, and every rank reads all files of that folder; remove it, or "
            + _fix("this machine's files")
        )
    if odd := _odd([code[2] for code in found]):
        package, *others = odd
        column = [code[2].get(package) for code in found]
        text = ", ".join(
            f"{each} on {_whose([r for r, v in enumerate(column) if v == each], hosts)}"
            for each in sorted(filter(None, set(column)))
        )
        also = f", and of {name_some(others)}" if others else ""
        raise MotleyError(
            f"the hosts have different versions of {package} ({text}){also}; install the same on "
            "all with: bash setup/install_cn.sh"
        )


def _fix(files: str) -> str:
    """Return advice to the user: the command that makes the code of all hosts the same."""
    if not ROOT:
        return "install one version of motley-train on all hosts with pip"
    return f"copy {files} to all hosts with: bash setup/sync_cn.sh"


def _is_code(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], dict)


def _odd(columns: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Return the names whose values differ between ranks, each with the ranks that deviate.

    The most frequent value counts as right. If two values are equally frequent, rank 0's value
    counts as right. Ranks without a value are ignored.

    Args:
        columns: for each rank, its values by name, such as hashes by file.
    """
    odd = {}
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        counts = Counter(value for value in values if value is not None)
        if len(counts) > 1:
            usual = max(counts, key=lambda each: (counts[each], each == values[0]))
            odd[name] = [rank for rank, value in enumerate(values) if value not in (None, usual)]
    return odd


def _find_extra(columns: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Return the files of registries that some ranks lack, each with the ranks that have the file.

    A registry is a folder in which each file adds something by itself, such as a dataset.
    """
    names = dict.fromkeys(name for column in columns for name in column)
    extra = {}
    for name in (each for each in names if each.startswith(_REGISTERED)):
        ranks = [rank for rank, column in enumerate(columns) if name in column]
        if len(ranks) < len(columns):
            extra[name] = ranks
    return extra


def _whose(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return a phrase that names hosts and their ranks, such as ``b (rank 1), c (ranks 2, 3)``.

    Args:
        ranks: the ranks to name.
        hosts: host of every rank, by rank.
    """
    numbers: dict[str, list[str]] = {}
    for rank in ranks:
        numbers.setdefault(hosts[rank], []).append(str(rank))
    return ", ".join(
        f"{host} (rank{'s' if len(own) > 1 else ''} {', '.join(own)})"
        for host, own in numbers.items()
    )


def _files(script: Path, words: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files to compare, each with the name that it has on all hosts."""
    before = len(f"{PACKAGE}/")
    for path in PACKAGE.rglob("*.py"):
        if path.is_file():  # an editor's lock of an unsaved file is a broken link
            yield f"src/motley/{str(path)[before:]}", path
    near = [script, *_loaded(script)]
    if ROOT and script.parent.is_relative_to(
        ROOT
    ):  # elsewhere it may be a home, full of other files
        near += [path for path in script.parent.glob("*") if path.suffix in _SUFFIXES]
    for path in near:
        if path.is_file():
            yield f"{path.parent.name}/{path.name}", path
    for path in _named(words):
        if os.path.isfile(path):  # noqa: PTH113 - Path.is_file() raises if a word is too long for a name
            yield str(path), path


def _loaded(script: Path) -> Iterator[Path]:
    """Yield the files of imported modules that belong neither to Motley nor to a package."""
    places = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    own = [script.parent, ROOT or script.parent, *(Path(place).resolve() for place in places)]
    installed = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), PACKAGE]
    known = (f"{PACKAGE}/", f"{Path(os.__file__).parent}/")  # Motley's and Python's
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        if file.startswith(known) or any(f"/{place}/" in file for place in _PLACES):
            continue  # most of thousands of modules: resolving each path would take half a second
        path = Path(file).resolve()
        if any(map(path.is_relative_to, own)) and not (
            any(map(path.is_relative_to, installed)) or _PLACES & set(path.parts)
        ):
            yield path


def _named(words: Sequence[str]) -> Iterator[Path]:
    """Yield the files that the command line names: modules, and values of options ``--*config``."""
    for before, word in pairwise(["", *words]):
        option, _, value = word.rpartition("=")
        path = Path(value)
        if path.suffix == ".py" or (option or before).endswith("config"):
            yield path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _release(found: str) -> str:
    """Return a version without its build, such as ``2.14.0`` for ``2.14.0+cu126``."""
    return found.partition("+")[0]
