"""The digits and their split are scikit-learn's, though it is not imported."""

import numpy as np
import pytest

from motley.data.datasets.digits import read_digits, split_by_class


def test_the_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits  # two seconds, for whoever collects tests

    pixels, labels = read_digits()
    there = load_digits()
    assert np.array_equal(pixels, there.data) and np.array_equal(labels, there.target)


@pytest.mark.parametrize("held_out", [360, 361, 100, 17])
def test_they_are_split_as_scikit_learn_does(held_out: int) -> None:
    from sklearn.model_selection import train_test_split

    _, labels = read_digits()
    everything = np.arange(len(labels))
    wanted = train_test_split(everything, test_size=held_out, random_state=0, stratify=labels)
    for own, theirs in zip(split_by_class(labels, held_out), wanted, strict=True):
        assert np.array_equal(own, theirs)
