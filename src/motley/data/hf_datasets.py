"""Data sets of Hugging Face's datasets library, from local folders or from the hub."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from motley.data.datasets import TRAIN
from motley.errors import MotleyError
from motley.registry import ASKED_OFFLINE, import_extra

_SAVED = ("dataset_dict.json", "state.json")  # one of them is in a folder of save_to_disk()


def is_folder(name: str) -> bool:
    """Return True if the name of a data set is the path of a folder on this host."""
    return bool(name) and Path(name).is_dir()


def get_place(name: str) -> str:
    """Return the absolute path of a local folder, or the unchanged name of a data set.

    The datasets library could mistake a relative path for the name of a file format.
    """
    return str(Path(name).resolve()) if is_folder(name) else name


def is_saved(folder: Path) -> bool:
    """Return True if ``save_to_disk`` of the datasets library has written the folder."""
    return any((folder / name).is_file() for name in _SAVED)


def import_datasets(option: str) -> Any:
    """Import the datasets package, and turn off its progress bars and warnings.

    Otherwise every rank would print the bars and warnings.

    Args:
        option: option that needs the package, for errors.
    """
    datasets = import_extra("datasets", option)
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets


@contextmanager
def hub_access(option: str, allowed: bool) -> Iterator[None]:
    """Allow or suppress requests to the Hugging Face hub in a ``with`` block.

    One rank per host makes the requests for all ranks of the host. Requests may be suppressed
    already before the block; see motley.registry.import_offline.

    Args:
        option: option that needs the hub, for errors.
        allowed: True: allow requests, unless the user has set HF_HUB_OFFLINE.
    """
    hub = import_extra("huggingface_hub.constants", option, "huggingface_hub")
    configs: list[Any] = [import_datasets(option).config, hub]
    before = [each.HF_HUB_OFFLINE for each in configs]
    for each in configs:
        each.HF_HUB_OFFLINE = not allowed or ASKED_OFFLINE
    try:
        yield
    finally:
        for each, value in zip(configs, before, strict=True):
            each.HF_HUB_OFFLINE = value


def load_splits(
    name: str,
    option: str,
    advice: str,
    cache_dir: Path | None,
    config: str | None = None,
    in_place: bool = False,
) -> Mapping[str, Any]:
    """Return all splits by name. Missing files are downloaded, and converted for access by index.

    Args:
        name: a folder, or OWNER/NAME of a data set of the hub.
        option: option that names the data set, for errors.
        advice: names and folders that the option takes, for errors.
        cache_dir: folder for downloads; None: the library's default folder.
        config: name of one of the data set's configurations; None: the default configuration.
        in_place: True: read a folder that ``save_to_disk`` has written without converting it. A
            folder with a single split is the training split.

    Raises:
        MotleyError: the data set cannot be loaded.
    """
    datasets = import_datasets(option)
    if not is_folder(name) and name.count("/") != 1:
        raise MotleyError(
            f"{option} is not a folder on this host; name a folder, or OWNER/NAME of a data set "
            "on the hub"
        )
    try:
        if in_place and is_folder(name) and is_saved(Path(name)):
            loaded = datasets.load_from_disk(get_place(name))
            return loaded if isinstance(loaded, Mapping) else {TRAIN: loaded}
        result: Mapping[str, Any] = datasets.load_dataset(
            get_place(name), config, cache_dir=None if cache_dir is None else str(cache_dir)
        )
    except Exception as error:  # errors of the many formats have no common type
        cause = error.__cause__ or error
        raise MotleyError(
            f"{option} cannot be loaded ({type(cause).__name__}: {' '.join(str(cause).split())}); "
            f"{advice}"
        ) from None
    return result
