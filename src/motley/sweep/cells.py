"""A matrix of ways to train: its cells, and the fp32 runs that they are compared with. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from motley.cluster.hostfile import Host
from motley.errors import MotleyError
from motley.text import did_you_mean

REFERENCE = "reference"  # begins the names of the fp32 runs


@dataclass(frozen=True)
class Cell:
    """One way to train.

    Attributes:
        name: a folder's name. hosts: the first so many.
        checkpointing: as ``--grad-checkpointing`` takes it; empty: none.
        batch: global. fraction: of the training set.
        script, options: of the training, the options without those of the other fields.
        limit_s: of its runs, where that is not the matrix's.
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
        """The training script and all that it is told."""
        checkpointing = ["--grad-checkpointing", self.checkpointing] if self.checkpointing else []
        return [
            self.script, "--precision", self.precision, "--batch-size", str(self.batch),
            "--data-fraction", f"{self.fraction:g}", *checkpointing, *self.options,
        ]  # fmt: skip

    @property
    def samples(self) -> tuple[int, float]:
        """What decides on which images its steps are."""
        return self.batch, self.fraction


@dataclass(frozen=True)
class Matrix:
    """All cells, and how they are run; one fixed seed.

    Attributes:
        references: fp32 runs of the same samples, for each kind of these; run once.
        hosts: of hosts.txt.
    """

    cells: tuple[Cell, ...]
    references: tuple[Cell, ...]
    hosts: tuple[Host, ...] = ()
    repeats: int = 3
    steps: int = 30
    limit_s: float = 600.0
    options: tuple[str, ...] = ()

    @property
    def all_cells(self) -> tuple[Cell, ...]:
        """The fp32 runs, then the others; a task's number is of these."""
        return (*self.references, *self.cells)

    def as_json(self) -> dict[str, Any]:
        """All that makes a result; how often and how long is not part of it."""
        return {
            "steps": self.steps, "options": list(self.options),
            "hosts": [[host.name, host.slots] for host in self.hosts],
            "cells": [
                {**asdict(cell), "options": list(cell.options), "limit_s": None}
                for cell in self.all_cells
            ],
        }  # fmt: skip


def first_hosts(cell: Cell, hosts: Sequence[Host]) -> tuple[Sequence[Host], int]:
    """Those that the cell is of, and their ranks."""
    chosen = hosts[: cell.hosts]
    return chosen, sum(host.slots for host in chosen)


def shorter(matrix: Matrix, only: str) -> Matrix:
    """The cells with these words in their names; MotleyError if there is none."""
    cells = tuple(cell for cell in matrix.cells if only in cell.name)
    if not cells:
        names = [cell.name for cell in matrix.cells]
        raise MotleyError(f"--only {only}: no cell is called so{did_you_mean(only, names)}")
    kinds = {cell.samples for cell in cells}
    kept = tuple(each for each in matrix.references if each.samples in kinds)
    return replace(matrix, cells=cells, references=kept)
