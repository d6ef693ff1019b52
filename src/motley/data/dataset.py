"""What ``--dataset`` can be: an entry of the registry in motley.data.datasets."""

import fcntl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from motley.errors import MotleyError
from motley.registry import entries
from motley.text import did_you_mean

if TYPE_CHECKING:
    from motley.data.images import Images


@dataclass(frozen=True)
class Dataset:
    """Images that are known by a name.

    Attributes:
        name: as ``--dataset`` takes it. says: of it, for ``-h``.
        open: from ``--data-dir``, for a model that takes so many pixels a side. It touches no
            network, raises MotleyError where something is missing or damaged, and imports what it
            needs itself: ``-h`` reads this file too.
        download: what is missing, into ``--data-dir``; None: nothing can be.
        model: that suits them, where ``--model`` names none.
        keeps: a run is worth checkpoints; not where there is nothing to learn.
        needs_workers: reading and decoding take longer than asking another process to.
    """

    name: str
    says: str
    open: Callable[[Path, int], "Images"]
    download: Callable[[Path], None] | None = None
    model: str = "vit_base_patch16_224"
    keeps: bool = True
    needs_workers: bool = True

    def prepare(self, folder: Path) -> None:
        """Download and unpack what is missing; call it on one rank a machine.

        Machines that share the folder wait for each other at a lock.
        """
        if self.download is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f".{self.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self.download(folder)
            except Exception as error:
                raise MotleyError(
                    f"{self.name} is not under {folder.resolve()} and could not be downloaded "
                    f"({type(error).__name__}: {error}); put its .tar.gz there, or choose "
                    "--dataset digits, which needs no download"
                ) from error


def known_datasets() -> dict[str, Dataset]:
    """All of them by name."""
    return {each.name: each for each in entries("motley.data.datasets", "DATASETS")}


def find_dataset(name: str) -> Dataset:
    """The dataset of this name."""
    known = known_datasets()
    if name not in known:
        raise MotleyError(
            f"--dataset {name} is unknown{did_you_mean(name, known)}; choose {', '.join(known)}"
        )
    return known[name]
