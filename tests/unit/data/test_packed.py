"""A folder in one file: the same images as in the folder, and what is wrong with a file."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures import picture_folder

from motley.data.datasets import find_dataset
from motley.data.images import Images
from motley.data.packed_file import JPEG, Keep, count_bytes, list_folder, open_packed, pack, shrunk
from motley.data.source import UnreadableSample, read
from motley.data.transforms import Look
from motley.errors import MotleyError

LOOK = Look(24, (0.5,) * 3, (0.5,) * 3, "bicubic")


def packed(root: Path, path: Path, keep: Keep | None = None) -> Images:
    pack(list_folder(root), keep or Keep(), path, 2, lambda _: None)
    return find_dataset("packed").open(path, 24)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return picture_folder(tmp_path / "pictures", truncated=("train/dog/2.png",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pictures.packed"


@pytest.mark.parametrize("kind", ["pixels", JPEG])
def test_what_is_not_shrunk_gives_the_samples_of_the_folder_bit_by_bit(
    root: Path, path: Path, kind: str
) -> None:
    ours, theirs = packed(root, path, Keep(kind)), find_dataset("folder").open(root, 24)
    assert ours.classes == theirs.classes and ours.identity
    for held_out in (False, True):
        source, reference = (
            (each.test if held_out else each.train) for each in (ours, theirs)
        )  # fmt: skip
        make = LOOK.for_evaluation(ours) if held_out else LOOK.for_training(ours)
        assert len(source) == len(reference) and source.targets == reference.targets  # type: ignore[attr-defined]
        for index in range(len(source)):
            try:
                image, label = read(reference, index)
            except UnreadableSample as error:
                with pytest.raises(UnreadableSample, match=r"2\.png .*truncated"):
                    read(source, index)
                assert "truncated" in str(error) and index == 12
                continue
            mine, its = read(source, index)
            torch.manual_seed(index)
            expected = make(image)
            torch.manual_seed(index)
            assert torch.equal(make(mine), expected) and label == its


def test_images_are_shrunk_once_and_of_a_known_size(root: Path, path: Path) -> None:
    keep = Keep("pixels", 20)
    images = packed(root, path, keep)
    assert images.train[0][0].shape == (3, 15, 20)
    readable = len(images.train) + len(images.test) - 1
    assert open_packed(path).content.nbytes - 64 == readable * 900
    assert count_bytes(list_folder(root), keep) in (readable * 900, (readable + 1) * 900)
    kept = packed(root, path.with_name("jpeg.packed"), Keep(JPEG, 20))
    assert kept.train[0][0].size == (20, 15) and kept.identity != images.identity
    difference = np.array(kept.train[0][0], int) - images.train[0][0].permute(1, 2, 0).numpy()
    assert abs(difference).mean() < 6


@given(st.integers(1, 5000), st.integers(1, 5000), st.none() | st.integers(1, 3000))
def test_a_shrunk_size_is_in_proportion(width: int, height: int, longest: int | None) -> None:
    new = shrunk((width, height), longest)
    assert min(new) >= 1
    if longest is None or max(width, height) <= longest:
        assert new == (width, height)
    else:
        assert max(new) == longest
        factor = longest / max(width, height)
        assert all(abs(a - max(1, b * factor)) <= 0.5 for a, b in zip(new, (width, height)))  # noqa: B905


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 20)


def written(at: int, content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at, 2 if at < 0 else 0)
            file.write(content)

    return change


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut, "is cut short: "),
        (
            cut_to_nothing,
            "is cut short: it has only 20 bytes. Copy it again, or pack it again with: bash",
        ),
        (
            written(8, b"\2"),
            "has version 2 of the file format, and this Motley reads version 1; pack it again",
        ),
        (written(0, b"PK"), "is not a packed data set"),
        (written(-3, b"\1"), "is damaged (the hash of its description of the images has changed"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_in_a_line(
    root: Path, path: Path, damage: Callable[[Path], None], says: str
) -> None:
    packed(root, path)
    damage(path)
    with pytest.raises(MotleyError) as caught:
        find_dataset("packed").open(path, 24)
    assert says in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_that_have_changed_since_are_seen(
    root: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = packed(root, path).identity
    (root / "train" / "cat" / "notes.txt").touch()  # no image
    assert find_dataset("packed").open(path.parent, 24).identity == before
    moved = root / "train" / "cat" / "3.png"
    content = moved.read_bytes()
    moved.unlink()
    with pytest.raises(MotleyError, match=r"have changed since\. Pack them again with: bash"):
        find_dataset("packed").open(path, 24)
    monkeypatch.setenv("MOTLEY_STALE_PACK", "1")
    assert find_dataset("packed").open(path, 24).identity == before
    monkeypatch.delenv("MOTLEY_STALE_PACK")
    moved.write_bytes(content)  # the same, at another time: what is learnt from is the same
    assert packed(root, path).identity == before
    root.rename(root.with_name("elsewhere"))
    assert find_dataset("packed").open(path, 24).identity == before  # they are not seen here


def test_a_folder_needs_one_file(root: Path, path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        MotleyError, match=r"has no file with a name of the form NAME\.packed; create one with"
    ):
        find_dataset("packed").open(tmp_path, 24)
    packed(root, path)
    packed(root, path.with_name("more.packed"))
    with pytest.raises(MotleyError, match=r"has 2 files: more\.packed, pictures\.packed with a"):
        find_dataset("packed").open(tmp_path, 24)


def test_a_place_that_cannot_be_written_is_named(root: Path) -> None:
    with pytest.raises(MotleyError, match="cannot be written: "):
        packed(root, Path("/proc/self/x.packed"))
