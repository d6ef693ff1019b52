"""A matrix of ways to train: its file, its cells, and the fp32 reference runs.

Each cell is one way to train. A matrix file has the form

    repeats = 3                 # of all cells, interleaved
    seed = "each"               # repeat k has the seed k; default: 0 for all
    steps = 30                  # of each run
    limit_s = 600               # after which a run is ended, as a hang
    options = ["--model", "vit_base_patch16_224", "--dataset", "synthetic"]  # of every cell
    script = "my/train.py"      # of every cell that names none; default: the strategy's

    [matrix]                    # one value or a list per key. Every combination is a cell.
    strategy = ["ddp", "fsdp", "zero1"]
    precision = "auto"          # as --precision
    checkpointing = [false, true]  # or a module's name, as --grad-checkpointing takes it
    batch = 512                 # global, or with weak = true per host
    hosts = "each"              # number of the first hosts of hosts.txt; "each": 1, 2, ... all
    fraction = 1.0              # of the training set; with weak = true per host
    options = ["", "--compile"]

    [matrix.sweep]              # values of any other option; every combination is a cell
    lr = {from = 1e-4, to = 1e-2, count = 3, log = true}
    weight-decay = [0.01, 0.05]

    [[cell]]                    # a single cell, with a name of its own
    name = "killed"
    script = "tests/support/drivers/failing.py"
    options = ["--fail", "killed"]
    limit_s = 60
"""

import itertools
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any

from motley.cluster.hostfile import Host
from motley.errors import MotleyError
from motley.plan.precision import PRECISIONS
from motley.text import did_you_mean

REFERENCE = "reference"  # begins the names of the fp32 runs


@dataclass(frozen=True)
class Cell:
    """One cell of a matrix: a way to train, with all its options.

    Attributes:
        name: name of the cell and of its folder.
        strategy: name of the strategy.
        precision: value of ``--precision``.
        checkpointing: value of ``--grad-checkpointing``; empty: none.
        batch: the global batch size.
        hosts: number of hosts on which the cell runs: the first hosts in hosts.txt.
        fraction: fraction of the training set that is used.
        script: training script.
        options: other options of the script, which no other attribute holds.
        limit_s: time limit of each run of the cell in seconds; None: the limit of the matrix.
    """

    name: str
    strategy: str
    precision: str
    checkpointing: str
    batch: int
    hosts: int
    fraction: float
    script: str
    options: tuple[str, ...] = ()
    limit_s: float | None = None

    @property
    def words(self) -> list[str]:
        """Words of the cell's command line: the training script and all its options."""
        checkpointing = ["--grad-checkpointing", self.checkpointing] if self.checkpointing else []
        return [
            self.script, "--precision", self.precision, "--batch-size", str(self.batch),
            "--data-fraction", f"{self.fraction:g}", *checkpointing, *self.options,
        ]  # fmt: skip

    @property
    def samples(self) -> tuple[int, float]:
        """Batch size and fraction of the training set, which determine the samples of each step."""
        return self.batch, self.fraction


@dataclass(frozen=True)
class Matrix:
    """All cells of a matrix, and the settings of their runs.

    Attributes:
        cells: the cells to compare.
        references: fp32 cells, one for each batch size and data fraction. The losses of all other
            cells are compared with those of the references. Each reference runs once.
        hosts: the hosts in hosts.txt.
        repeats: number of runs of each cell.
        steps: number of steps of each run.
        limit_s: time limit of a run in seconds.
        options: options that all cells have.
        varies_seed: True if repeat k has the seed k. False: all repeats have the seed 0.
    """

    cells: tuple[Cell, ...]
    references: tuple[Cell, ...]
    hosts: tuple[Host, ...] = ()
    repeats: int = 3
    steps: int = 30
    limit_s: float = 600.0
    options: tuple[str, ...] = ()
    varies_seed: bool = False

    def get_seed(self, repeat: int) -> int:
        """Return the seed of a repeat of all cells.

        Args:
            repeat: number of the repeat, from 0.
        """
        return repeat if self.varies_seed else 0

    @property
    def all_cells(self) -> tuple[Cell, ...]:
        """The fp32 references, then the other cells.

        The number of a Slurm task is an index of this tuple.
        """
        return (*self.references, *self.cells)

    def as_json(self) -> dict[str, Any]:
        """Return all settings that affect a result.

        The number of repeats and the time limits are left out, because they affect no result.
        """
        return {
            "steps": self.steps, "options": list(self.options), "varies_seed": self.varies_seed,
            "hosts": [[host.name, host.slots] for host in self.hosts],
            "cells": [
                {**asdict(cell), "options": list(cell.options), "limit_s": None}
                for cell in self.all_cells
            ],
        }  # fmt: skip


def first_hosts(cell: Cell, hosts: Sequence[Host]) -> tuple[Sequence[Host], int]:
    """Return the hosts of a cell, and the total number of ranks on these hosts."""
    chosen = hosts[: cell.hosts]
    return chosen, sum(host.slots for host in chosen)


def shorter(matrix: Matrix, only: str) -> Matrix:
    """Return the matrix with only the cells whose names contain the text ``only``.

    Raises:
        MotleyError: there is no such cell.
    """
    cells = tuple(cell for cell in matrix.cells if only in cell.name)
    if not cells:
        names = [cell.name for cell in matrix.cells]
        raise MotleyError(f"--only {only}: no cell has this in its name{did_you_mean(only, names)}")
    kinds = {cell.samples for cell in cells}
    references = tuple(each for each in matrix.references if each.samples in kinds)
    return replace(matrix, cells=cells, references=references)


DDP = "torch_dist/train_vit.py"  # script of the fp32 reference runs
PRESETS = {
    name: Path(__file__).with_name("presets") / f"{name}.toml"
    for name in ("strong", "weak", "precision", "strategies", "full", "weather")
}
_PRECISIONS = ("auto", *PRECISIONS)
_AXES: Mapping[str, Any] = {  # with the defaults
    "strategy": "ddp", "precision": "auto", "checkpointing": False, "batch": 128, "hosts": None,
    "fraction": 1.0, "options": "",
}  # fmt: skip
_OF_ALL = ("repeats", "seed", "steps", "limit_s", "options", "script", "matrix", "cell")
_RANGE = ("from", "to", "count", "log")  # keys of a range; log may be left out
_NAME = r"[A-Za-z0-9][\w.+-]*"
_LEAST = {"repeats": 1, "steps": 6, "limit_s": 1}


@dataclass(frozen=True)
class KnownNames:
    """The registered names that a matrix may use.

    Attributes:
        strategies: for each strategy by name, the script and the options that select the strategy.
        owned: options of training scripts for which a matrix file has a separate key, with the key.
    """

    strategies: Mapping[str, tuple[str, tuple[str, ...]]]
    owned: Mapping[str, str]


def read_matrix(path: Path, hosts: Sequence[Host], known: KnownNames, **changes: Any) -> Matrix:
    """Return the matrix of a file, for these hosts.

    Args:
        path: path of the file.
        hosts: the hosts.
        known: known strategies and options.
        changes: values of ``repeats``, ``steps`` and ``limit_s`` that replace those of the file,
            unless they are None. The value of ``options`` is added to the file's options.

    Raises:
        MotleyError: the file is no TOML, or has an unknown key or strategy, or a cell that is
            impossible with these hosts.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MotleyError(f"{path} is not a readable TOML file: {error}") from None
    _check_keys(path, content, _OF_ALL, "")
    shared = (*_words(path, content.get("options", "")), *(changes.pop("options", None) or ()))
    if owned := [word for word in shared if word.partition("=")[0] in known.owned]:
        instead = known.owned[owned[0].partition("=")[0]]
        fix = "leave it out" if instead == "nothing" else f"use {instead} instead"
        raise MotleyError(f"{owned[0]}: Motley sets this option for each cell; {fix}")
    given: dict[str, Any] = {
        key: content[key] for key in ("repeats", "steps", "limit_s") if key in content
    }
    given |= {key: value for key, value in changes.items() if value is not None}
    script = {"script": content["script"]} if "script" in content else {}
    cells = [
        *(_product(path, content["matrix"], script, hosts, known) if "matrix" in content else ()),
        *(_single(path, {**script, **entry}, hosts, known) for entry in content.get("cell", ())),
    ]
    if not cells:
        raise MotleyError(f"{path} has no cell; add a [matrix], or a [[cell]]")
    _check_numbers(path, given)
    _check_names(path, [cell.name for cell in cells])
    for cell in cells:
        _check_cell(path, cell, hosts)
    kinds = dict.fromkeys(cell.samples for cell in cells)
    references = tuple(
        Cell(
            f"{REFERENCE}_b{batch}_f{fraction:g}" if len(kinds) > 1 else REFERENCE, "ddp", "fp32",
            "", batch, len(hosts), fraction, content.get("script", DDP), ("--wire", "exact"),
        )
        for batch, fraction in kinds
    )  # fmt: skip
    return Matrix(
        tuple(cells), references, tuple(hosts), options=shared,
        varies_seed=_read_seed(path, content.get("seed", 0)), **given,
    )  # fmt: skip


def _read_seed(path: Path, seed: Any) -> bool:
    """Return True if each repeat has a different seed."""
    if seed not in (0, "each"):
        raise MotleyError(
            f'{path}: seed is {seed!r}; write seed = "each", which gives repeat k the seed k, or '
            "leave it out for the seed 0"
        )
    return bool(seed == "each")


def _check_numbers(path: Path, given: Mapping[str, Any]) -> None:
    for key, least in _LEAST.items():
        value = given.get(key, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise MotleyError(f"{path}: {key} is {value!r}; give a number of {least} or more")


def _check_names(path: Path, names: Sequence[str]) -> None:
    if odd := next((name for name in names if not re.fullmatch(_NAME, name)), None):
        raise MotleyError(
            f"{path}: a cell has the name {odd!r}; use letters, digits, - and _ alone"
        )
    if taken := next((name for name in names if name.startswith(REFERENCE)), None):
        raise MotleyError(
            f"{path}: the name {taken} is reserved for runs in fp32; choose another name"
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise MotleyError(f"{path}: two cells have the name {twice}; rename one of them")


def _product(
    path: Path,
    axes: Mapping[str, Any],
    script: Mapping[str, Any],
    hosts: Sequence[Host],
    known: KnownNames,
) -> list[Cell]:
    _check_keys(path, axes, (*_AXES, "weak", "sweep"), "matrix.")
    weak = axes.get("weak", False)
    values = {axis: _values(axes.get(axis, usual)) for axis, usual in _AXES.items()}
    values["hosts"] = [
        count for value in values["hosts"]
        for count in (range(1, len(hosts) + 1) if value == "each" else [value or len(hosts)])
    ]  # fmt: skip
    sweep = axes.get("sweep", {})
    if not isinstance(sweep, dict):
        raise MotleyError(
            f"{path}: matrix.sweep is {sweep!r}, and has to be a table; write options below "
            "[matrix.sweep]"
        )
    swept = {flag: _swept(path, flag, each, known) for flag, each in sweep.items()}
    cells = []
    for choice, settings in itertools.product(
        itertools.product(*values.values()), itertools.product(*swept.values())
    ):
        named = dict(zip(values, choice, strict=True))
        chosen = dict(zip(swept, settings, strict=True))
        varied = {axis: value for axis, value in named.items() if len(values[axis]) > 1}
        if weak:
            named["batch"] *= named["hosts"]
            named["fraction"] *= named["hosts"] / len(hosts)
        words = [word for flag, value in chosen.items() for word in (_flag(flag), value)]
        named["options"] = [*_words(path, named["options"]), *words]
        several = {flag: value for flag, value in chosen.items() if len(swept[flag]) > 1}
        name = "_".join(filter(None, (_name(varied), *starmap(_swept_name, several.items()))))
        cells.append(_cell(path, name or str(named["strategy"]), {**named, **script}, known))
    return cells


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _swept_name(option: str, value: str) -> str:
    return f"{_plain(option)}{_plain(value)}"


def _swept(path: Path, option: str, given: Any, known: KnownNames) -> list[str]:
    """Return all values of an option of ``[matrix.sweep]``, as texts.

    Args:
        path: path of the file.
        option: name of the option.
        given: a value, a list, or a range with ``from``, ``to`` and ``count``. With ``log``, the
            values of a range have equal ratios.
        known: registered names, with the options that a sweep may not set.

    Raises:
        MotleyError: the matrix sets the option elsewhere, or the range is not valid.
    """
    if (flag := _flag(option)) in known.owned:
        instead = known.owned[flag]
        fix = "leave it out" if instead == "nothing" else f"use {instead} of the matrix instead"
        raise MotleyError(f"{path}: matrix.sweep sets {option}; {fix}")
    if not isinstance(given, dict):
        return [str(value) for value in _values(given)]
    _check_keys(path, given, _RANGE, f"matrix.sweep.{option}.")
    first, last, count = (given.get(key) for key in _RANGE[:3])
    is_log = given.get("log", False)
    numbers = [each for each in (first, last) if isinstance(each, int | float)]
    if (
        len(numbers) < 2
        or not isinstance(count, int)
        or count < 2
        or (is_log and min(numbers) <= 0)
    ):
        raise MotleyError(
            f"{path}: matrix.sweep.{option} is not a range; write {{from = 1e-4, to = 1e-2, count "
            "= 3, log = true}, where log = true takes equal ratios and needs positive ends, or "
            "write a list of values"
        )
    low, high = numbers
    parts = [place / (count - 1) for place in range(count)]
    if is_log:
        return [f"{low * (high / low) ** part:.6g}" for part in parts]
    return [f"{low + (high - low) * part:.6g}" for part in parts]


def _values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _name(told: Mapping[str, Any]) -> str:
    """Return the name of a cell, with a word for each property in which the cells differ."""
    words = []
    for axis, value in told.items():
        if axis == "checkpointing":
            words += ["ckpt" if value is True else _plain(value)] if value else []
        elif axis in ("batch", "hosts", "fraction"):
            words.append(f"{axis}{value:g}")
        elif value:
            words.append(_plain(value))
    return "_".join(words)


def _plain(value: object) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-.")


def _words(path: Path, options: Any) -> list[str]:
    """Return the words of options, which are a list of words or one text as in a shell."""
    try:
        return shlex.split(options) if isinstance(options, str) else [str(word) for word in options]
    except (TypeError, ValueError) as error:
        raise MotleyError(f"{path}: options {options!r}: {error}") from None


def _single(path: Path, entry: Mapping[str, Any], hosts: Sequence[Host], known: KnownNames) -> Cell:
    _check_keys(path, entry, (*_AXES, "name", "script", "limit_s"), "cell.")
    named = {**_AXES, **entry}
    named["hosts"] = named["hosts"] or len(hosts)
    return _cell(path, str(entry.get("name", "")), named, known)


def _cell(path: Path, name: str, named: Mapping[str, Any], known: KnownNames) -> Cell:
    strategy = named["strategy"]
    if str(strategy) not in known.strategies:
        raise MotleyError(
            f"{path}: the strategy {strategy} is "
            f"unknown{did_you_mean(str(strategy), known.strategies)}; choose one of "
            f"{', '.join(known.strategies)}"
        )
    script, words = known.strategies[strategy]
    checkpointing = named["checkpointing"]
    more = _words(path, named["options"])
    try:
        return Cell(
            name, strategy, str(named["precision"]),
            "blocks" if checkpointing is True else str(checkpointing or ""),
            int(named["batch"]), int(named["hosts"]), float(named["fraction"]),
            str(named.get("script", script)), (*words, *more), named.get("limit_s"),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise MotleyError(f"{path}: cell {name}: {error}") from None


def _check_cell(path: Path, cell: Cell, hosts: Sequence[Host]) -> None:
    """Raise MotleyError if the cell is impossible with these hosts."""
    where = f"{path}: cell {cell.name}"
    if not 1 <= cell.hosts <= len(hosts):
        raise MotleyError(
            f"{where} is for {cell.hosts} hosts, and hosts.txt names {len(hosts)}; change one "
            "of the two"
        )
    _, ranks = first_hosts(cell, hosts)
    if cell.batch < 1 or not 0 < cell.fraction <= 1:
        raise MotleyError(
            f"{where} has a batch of {cell.batch} and the fraction {cell.fraction:g}; give a "
            "batch of 1 or more, and a fraction above 0 and at most 1"
        )
    precisions = cell.precision.split(",")
    if unknown := [each for each in precisions if each not in _PRECISIONS]:
        raise MotleyError(
            f"{where}: the precision {unknown[0]} is unknown{did_you_mean(unknown[0], _PRECISIONS)}"
        )
    if len(precisions) not in (1, ranks):
        raise MotleyError(
            f"{where}: {len(precisions)} precisions are given for the {ranks} ranks of "
            f"{cell.hosts} hosts; give one for all ranks, or one per rank"
        )


def _check_keys(path: Path, found: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in found:
        if key not in known:
            raise MotleyError(f"{path}: the key {where}{key} is unknown{did_you_mean(key, known)}")
