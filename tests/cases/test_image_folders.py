"""Image folders as people have them: what is read is what they mean, and the rest is named."""

import errno
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from motley.config.options import Config
from motley.data.datasets import find_dataset
from motley.data.images import Images, load_image
from motley.data.packed_file import SUFFIX, Keep, list_folder, pack
from motley.errors import MotleyError
from motley.tasks.builtin import get_task
from motley.tasks.builtin.image import ImageTask
from motley.train.command_line import read_config, training_parser

PARTS = {"train": 8, "val": 4}


def picture(path: Path, size: int = 8) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(str(path))).integers(0, 255, (size, size, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def folder(root: Path, *classes: str) -> Path:
    for part, count in PARTS.items():
        for name in classes or ("cat", "dog"):
            for number in range(count):
                picture(root / part / name / f"{number}.png")
    return root


def images_of(root: Path) -> Images:
    words = ["--data-dir", str(root), "--model", "test_vit", "--workers", "0"]
    config: Config = read_config(training_parser("test"), words)
    task = get_task(config)
    assert isinstance(task, ImageTask)
    return task.images


def _foreign(root: Path) -> None:
    for part in PARTS:
        for name in ("@eaDir", "__MACOSX", ".ipynb_checkpoints", "#recycle"):
            picture(root / part / name / "a" / "thumbnail.jpg")
        picture(root / part / "cat" / "@eaDir" / "0.png")
        for name in (".DS_Store", "Thumbs.db", "cat/._0.png", "cat/desktop.ini"):
            (root / part / name).write_bytes(b"\0\5\x16\7")


def _loop(root: Path) -> None:
    (root / "train/cat/loop").symlink_to("..")
    (root / "train/cat/again").symlink_to("again")


def _loose(root: Path) -> None:
    for number in range(3):
        picture(root / "train" / f"{number}.png")
    (root / "train/cat/notes.TXT").write_text("hello")


def _gifs(root: Path) -> None:
    for path in sorted(root.glob("*/dog/*.png")):
        Image.open(path).save(path.with_suffix(".gif"))
        path.unlink()


def _forms(root: Path) -> None:
    (root / "train/cat").rename(root / "train/caf\u00e9")
    (root / "val/cat").rename(root / "val/cafe\u0301")


def _nested(root: Path) -> None:
    for number in range(3):
        picture(root / "train/cat/2023/may" / f"{number}.png")


def _empty(root: Path) -> None:
    for part in PARTS:
        (root / part / "bird").mkdir()


def _timm(root: Path) -> None:
    (root / "val").rename(root / "validation")


USUAL = "16 images of 2 classes, 8 held out"


@pytest.mark.parametrize(
    ("change", "account"),
    [
        (lambda root: None, USUAL),
        (_foreign, USUAL),
        (_loop, f"{USUAL}; not read: 1 link to a folder that is read already, 1 file without an "
         "ending"),
        (_loose, f"{USUAL}; not read: 3 .png in no class folder, 1 .txt"),
        (_gifs, USUAL),
        (_forms, USUAL),
        (_timm, USUAL),
        (_nested, "19 images of 2 classes, 8 held out"),
        (_empty, "16 images of 3 classes, 8 held out; no image in train/ of bird; no image in "
         "val/ of bird"),
    ],
    ids=["usual", "foreign", "loop", "loose", "gif", "unicode", "timm", "nested", "empty"],
)  # fmt: skip
def test_what_is_read_is_told(tmp_path: Path, change: Callable[[Path], None], account: str) -> None:
    change(folder(tmp_path))
    images = images_of(tmp_path)
    assert images.account == account
    assert all(
        len(np.unique(np.asarray(image))) > 1 for image, _ in (images.train[0], images.test[0])
    )


def test_two_forms_of_one_name_are_refused(tmp_path: Path) -> None:
    folder(tmp_path, "caf\u00e9", "cafe\u0301")
    with pytest.raises(MotleyError, match="two folders for the class caf"):
        images_of(tmp_path)


def test_names_in_another_form_are_the_same_list_in_the_same_order(tmp_path: Path) -> None:
    """A host whose folder was copied from macOS has decomposed names: without care, zoe before
    zo\u00eb's neighbour there and behind it here."""
    lists = []
    for form in ("NFC", "NFD"):
        root = tmp_path / form
        for part in PARTS:
            for name in ("\u00e9t\u00e9", "hiver"):
                for file in ("zoe9.png", "zo\u00eb.png", "zof.png"):
                    picture(root / part / unicodedata.normalize(form, f"{name}/{file}"))
        images = images_of(root)
        lists.append([
            (unicodedata.normalize("NFC", str(Path(path).relative_to(root / "train"))), label)
            for path, label in images.train.samples  # type: ignore[attr-defined]
        ])  # fmt: skip
        lists.append([images.fingerprint()])
    assert lists[:2] == lists[2:]


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
def test_a_photo_is_upright_as_its_exif_tag_says(tmp_path: Path, name: str) -> None:
    pixels = np.kron(np.arange(6, dtype=np.uint8).reshape(2, 3, 1) * 40, np.ones((16, 16, 3)))
    image = Image.fromarray(pixels.astype(np.uint8))
    path = tmp_path / name
    for orientation in range(10):  # 0 and 9 mean nothing
        tags = Image.Exif()
        tags[ExifTags.Base.Orientation] = orientation
        image.save(path, exif=tags, lossless=True)
        with Image.open(path) as opened:
            opened.load()
            due = ImageOps.exif_transpose(opened).convert("RGB")
        assert due.size == ((48, 32) if orientation not in range(5, 9) else (32, 48))
        assert np.array_equal(np.asarray(load_image(str(path))), np.asarray(due)), orientation
    if name != "a.tif":
        image.save(path, exif=b"Exif\0\0nonsense", lossless=True)
    assert load_image(str(path)).size == image.size


@pytest.mark.parametrize("kind", ["pixels", "jpeg"])
def test_a_packed_photo_is_upright_too(tmp_path: Path, kind: str) -> None:
    folder(tmp_path / "images")
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = 6
    photo = tmp_path / "images" / "train" / "cat" / "0.png"
    Image.fromarray(np.full((4, 12, 3), 99, np.uint8)).save(photo, exif=tags)
    grey = tmp_path / "images" / "train" / "cat" / "1.png"
    Image.fromarray(np.full((4, 12), 257 * 50, np.uint16)).save(grey)
    packed = tmp_path / f"all{SUFFIX}"
    listed = list_folder(tmp_path / "images")
    assert pack(listed, Keep(kind), packed, 1, lambda count: None) == ()
    images = find_dataset("packed").open(packed, 0).train
    upright, scaled = (
        each.permute(1, 2, 0).numpy() if kind == "pixels" else np.asarray(each)
        for each in (images[0][0], images[1][0])
    )
    assert upright.shape == (12, 4, 3) and scaled.max() == 50  # as from the folder


def test_a_closed_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's answer is put in, since root, which runs these tests, reads every folder."""
    folder(tmp_path)
    scan, closed = os.scandir, str(tmp_path / "train/dog")

    def scandir(path: str) -> Any:
        if str(path) == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    account = images_of(tmp_path).account
    assert account.endswith("; not read: 1 folder (Permission denied); no image in train/ of dog")


GREY = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4


@pytest.mark.parametrize("name", ["deep.png", "deep.tif", "deep.pgm"])
def test_sixteen_bits_are_scaled(tmp_path: Path, name: str) -> None:
    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / name)
    assert np.array_equal(np.asarray(load_image(str(tmp_path / name)))[..., 0], GREY)


@pytest.mark.parametrize(
    ("pixels", "says"),
    [(GREY.astype(np.float32) / 255, "are floats"), (GREY.astype(np.int32) * 257, "are 32-bit")],
)
def test_pixels_of_an_unknown_range_are_refused(
    tmp_path: Path, pixels: np.ndarray, says: str
) -> None:
    Image.fromarray(pixels).save(tmp_path / "pixels.tif")
    with pytest.raises(ValueError, match=says):
        load_image(str(tmp_path / "pixels.tif"))


def test_inference_leaves_out_what_other_programs_put_there(tmp_path: Path) -> None:
    for name in ("@eaDir/a.png", ".cache/a.png", "a/.b.png", "a/b.png", "c.PNG"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name, "PNG")
    task = ImageTask(dataset="digits").with_files(tmp_path)
    source = task.data(held_out=True)
    assert [task.name_of(source, index) for index in range(len(source))] == ["a/b.png", "c.PNG"]
