"""The kinds of ``--dataset``: a file here adds one by listing it under ``DATASETS``."""

import fcntl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from motley.errors import MotleyError
from motley.registry import entries
from motley.text import did_you_mean

if TYPE_CHECKING:
    from motley.data.images import Images

# Splits as those name them who publish images; the first of these that is there is held out.
TRAIN = "train"
HELD_OUT = ("validation", "val", "valid", "test")


@dataclass(frozen=True)
class Dataset:
    """Images that are known by a name.

    Attributes:
        name: as ``--dataset`` takes it. says: of it, for ``-h``.
        open: from ``--data-dir``, for a model that takes so many pixels a side. This function
            touches no network, raises MotleyError where a file is missing or damaged, and imports
            its packages itself: ``-h`` reads this file too.
        download: missing files, into ``--data-dir``; None: nothing can be.
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
        with (folder / f".{self.name.replace('/', '-')}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self.download(folder)
            except MotleyError:
                raise
            except Exception as error:
                raise MotleyError(
                    f"{self.name} is not under {folder.resolve()} and could not be downloaded "
                    f"({type(error).__name__}: {error}); put its .tar.gz there, or choose "
                    "--dataset digits, which needs no download"
                ) from error


@dataclass(frozen=True)
class Family:
    """Datasets whose names begin alike.

    Attributes:
        name: how they begin, with a slash at the end, as in ``hfds/``.
        says: of them, for ``-h``.
        make: return the dataset whose name goes on with these words.
    """

    name: str
    says: str
    make: Callable[[str], Dataset]


def known_datasets() -> dict[str, Dataset | Family]:
    """All of them by name, or by how their names begin."""
    return {each.name: each for each in entries("motley.data.datasets", "DATASETS")}


def find_dataset(name: str) -> Dataset:
    """Return the dataset of this name."""
    known = known_datasets()
    begins, slash, rest = name.partition("/")
    result = known.get(begins + slash)
    if result is None:
        raise MotleyError(
            f"--dataset {name} is unknown{did_you_mean(name, known)}; choose {', '.join(known)}"
        )
    return result.make(rest) if isinstance(result, Family) else result


def dataset_name(text: str) -> str:
    """Return the text of ``--dataset`` if there is a dataset of this name."""
    find_dataset(text)
    return text


def held_out_split(splits: Collection[str], where: str) -> str:
    """Return the name of the split that is held out.

    Args:
        splits: names of the splits.
        where: beginning of the error message.

    Raises:
        MotleyError: there is none, or none to train on.
    """
    result = next((name for name in HELD_OUT if name in splits), None)
    if TRAIN not in splits or result is None:
        raise MotleyError(
            f"{where} has {'the splits ' + ', '.join(splits) if splits else 'no split'}; it needs "
            f"{TRAIN}, and {' or '.join(HELD_OUT)}"
        )
    return result
