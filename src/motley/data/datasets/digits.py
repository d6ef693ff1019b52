"""Handwritten digits of scikit-learn: 1,797 images of 8x8 pixels, and 360 of these held out."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.data.datasets import Dataset

if TYPE_CHECKING:
    from motley.data.images import Images

_HELD_OUT = 360


def read_digits() -> tuple[Any, Any]:
    """Return scikit-learn's digits without importing scikit-learn.

    Importing scikit-learn takes four seconds if five ranks on two cores do so at once.

    Returns:
        The pixels, 0 to 16, fp64 [1797, 64], and the digits, int64 [1797].
    """
    import numpy as np

    package = find_spec("sklearn")  # finds the files wherever the package is installed
    if package is None or package.origin is None:
        raise ModuleNotFoundError("no module named sklearn", name="sklearn")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    data = np.loadtxt(str(path), delimiter=",")
    return data[:, :-1], data[:, -1].astype(np.int64)


def split_by_class(labels: Any, held_out: int) -> tuple[Any, Any]:
    """Return the indices of the training samples, and those of the held-out samples.

    Both parts have the same proportions of classes. The result equals that of
    ``sklearn.model_selection.train_test_split(random_state=0, stratify=labels)``, so that results
    can be compared with earlier measurements.

    Args:
        labels: label of each sample, int [samples].
        held_out: number of samples to hold out.

    Returns:
        Two arrays of indices into ``labels``.
    """
    import numpy as np

    rng = np.random.RandomState(0)
    counts = np.bincount(labels)
    training = _apportion_counts(counts, len(labels) - held_out, rng)
    testing = _apportion_counts(counts - training, held_out, rng)
    train: list[int] = []
    test: list[int] = []
    for label, count in enumerate(counts):
        own = np.flatnonzero(labels == label)[rng.permutation(count)]
        train += own[: training[label]].tolist()
        test += own[training[label] :][: testing[label]].tolist()
    return rng.permutation(train), rng.permutation(test)


def _apportion_counts(counts: Any, total: int, rng: Any) -> Any:
    """Split ``total`` in proportion to the counts, and return whole numbers, int [classes].

    The counts are rounded down. The remainder goes to the classes with the largest fractional
    parts, and is drawn at random among classes with equal parts.
    """
    import numpy as np

    exact = counts / counts.sum() * total
    parts = np.floor(exact)
    for value in np.unique(exact - np.floor(exact))[::-1]:
        (places,) = np.where(exact - np.floor(exact) == value)
        if not (remaining := min(len(places), int(total - parts.sum()))):
            break
        parts[rng.choice(places, size=remaining, replace=False)] += 1
    return parts.astype(int)


def _open(folder: Path, img_size: int) -> "Images":
    import numpy as np
    import torch

    from motley.data.images import Images, InMemory

    grey, labels = read_digits()
    pixels = torch.from_numpy((grey * (255 / 16)).round().astype(np.uint8)).view(-1, 1, 8, 8)
    train, test = (
        InMemory(pixels[part], torch.from_numpy(labels[part]))
        for part in split_by_class(labels, _HELD_OUT)
    )
    return Images(
        train, test, classes=10, channels=1,
        mean=(0.305,), std=(0.377,), native_size=8, augment=False,
        class_names=tuple("0123456789"),
    )  # fmt: skip


DATASETS = (
    Dataset(
        "digits", "(default) ships with scikit-learn", _open,
        model="vit_digits", needs_workers=False,
    ),
)  # fmt: skip
