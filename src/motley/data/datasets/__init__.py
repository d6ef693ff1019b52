"""The data sets that ``--dataset`` can name.

A module in this package adds data sets by listing them in ``DATASETS``.
"""

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

# Usual names of splits. The first of these that exists is held out.
TRAIN = "train"
HELD_OUT = ("validation", "val", "valid", "test")
CLASS, LABELS, VALUE = "class", "labels", "value"  # an image has one, any number, or a number


@dataclass(frozen=True)
class Dataset:
    """A data set of images, known by its name.

    Attributes:
        name: value of ``--dataset`` that selects the data set.
        says: description for ``-h``.
        open: function that opens the data set. Its arguments are the path of ``--data-dir``, and
            the side in pixels of the images that the model takes. The function does not use the
            network, and raises MotleyError if a file is missing or damaged. The function imports
            its packages itself, because ``-h`` imports this module, too.
        download: function that downloads missing files into the folder ``--data-dir``; None:
            nothing can be downloaded.
        model: default of ``--model``.
        keeps: True: runs write checkpoints. False: the data set is noise, from which nothing can be
            learnt.
        needs_workers: True if reading and decoding an image take longer than passing it between
            processes.
    """

    name: str
    says: str
    open: Callable[[Path, int], "Images"]
    download: Callable[[Path], None] | None = None
    model: str = "vit_base_patch16_224"
    keeps: bool = True
    needs_workers: bool = True

    def prepare(self, folder: Path) -> None:
        """Download and unpack missing files. Only one rank of each host calls this method.

        Hosts that share the folder wait for each other at a lock.

        Raises:
            MotleyError: the download fails.
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
                    f"{self.name} is not in {folder.resolve()}, and could not be downloaded "
                    f"({type(error).__name__}: {error}); copy its .tar.gz there, or choose "
                    "--dataset digits, which needs no download"
                ) from error


@dataclass(frozen=True)
class Family:
    """Data sets whose names begin with the same prefix.

    Attributes:
        name: prefix with a slash at the end, as in ``hfds/``.
        says: description for ``-h``.
        make: function that returns a data set, given the part of its name after the prefix.
    """

    name: str
    says: str
    make: Callable[[str], Dataset]


def known_datasets() -> dict[str, Dataset | Family]:
    """Return all data sets and families by name or prefix."""
    listed = entries(
        __name__, "DATASETS", lambda item: isinstance(item, Dataset | Family), "Dataset(...)",
        "synthetic",
    )  # fmt: skip
    return {each.name: each for each in listed}


def find_dataset(name: str) -> Dataset:
    """Return the data set with this name.

    Raises:
        MotleyError: the name is unknown.
    """
    known = known_datasets()
    begins, slash, rest = name.partition("/")
    result = known.get(begins + slash)
    if result is None:
        raise MotleyError(
            f"--dataset {name} is unknown{did_you_mean(name, known)}; choose {', '.join(known)}"
        )
    return result.make(rest) if isinstance(result, Family) else result


def dataset_name(text: str) -> str:
    """Return the text of ``--dataset`` if it is the name of a data set.

    Raises:
        MotleyError: the name is unknown.
    """
    find_dataset(text)
    return text


def held_out_split(splits: Collection[str], where: str) -> str:
    """Return the name of the split whose samples are held out.

    Args:
        splits: names of the splits.
        where: beginning of the error message.

    Raises:
        MotleyError: there is no split to hold out, or none to train on.
    """
    result = next((name for name in HELD_OUT if name in splits), None)
    if TRAIN not in splits or result is None:
        raise MotleyError(
            f"{where} has {('the splits ' + ', '.join(splits) if splits else 'no split')}, and "
            f"needs the splits {TRAIN} and {' or '.join(HELD_OUT)}"
        )
    return result
