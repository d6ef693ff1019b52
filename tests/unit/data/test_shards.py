"""Images of webdataset's shards, by index: which, from where, and what is wrong with them."""

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hub_images import check_images, opened, picture, png, samples, write_shard, write_shards
from PIL import Image

from motley.data.source import UnreadableSample, read
from motley.errors import MotleyError


@pytest.mark.parametrize("kind", ["flat", "folders", "told"])
def test_shards_are_read_by_index(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "test-sets"  # a word above the folder says nothing of a shard
    folder = write_shards(root / "colours")
    if kind == "folders":
        for split in ("train", "val"):
            (folder / split).mkdir()
            for path in folder.glob(f"*-{split}-*.tar"):
                path.rename(folder / split / path.name[-8:])
    elif kind == "told":
        files = sorted(path.name for path in folder.glob("*.tar"))
        tell = {"train": (files[:2], 48), "validation": (files[2:], 12)}
        splits = {
            name: {"name": name, "num_samples": count, "filenames": names}
            for name, (names, count) in tell.items()
        }
        (folder / "_info.json").write_text(json.dumps({"splits": splits}))
    for name, place in (("", folder), ("colours", root), ("any", folder), (str(folder), root)):
        check_images(opened(f"wds/{name}", place), 48, (48, 12))
    images = opened("wds/", folder)
    assert images.name_of(images.train, 25).endswith("0001.tar: '00025.png'")
    assert images.name_of(images.test, 3).endswith("0000.tar: '00051.png'")


def test_a_shard_is_read_alike_in_forked_processes(tmp_path: Path) -> None:
    images = opened("wds/", write_shards(tmp_path))
    images.train[0]
    children = []
    for begin in range(3):
        if (pid := os.fork()) == 0:
            same = all(
                np.array_equal(np.array(images.train[i][0]), np.array(picture(i % 3, i)))
                for i in [*range(begin, 48), *range(48)]
            )
            os._exit(0 if same else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]


def test_samples_are_put_together_as_webdataset_does(tmp_path: Path) -> None:
    """By the path up to the first dot; whatever is no image with a label is left out."""
    members = [
        ("a/x.png", png(1, 1)), ("a/x.seg.png", b"no image"), ("a/x.cls", b"1\n"),
        ("b/x.JPG", png(2, 2)), ("b/x.json", b'{"label": 2, "text": "blue"}'),
        ("long/" * 40 + "x.png", png(0, 3)), ("long/" * 40 + "x.cls", b"0"),
        ("._x.png", b"of a Mac"), ("README", b"?"), ("c.cls", b"77"), ("__info__.json", b"{}"),
    ]  # fmt: skip
    write_shard(tmp_path / "train.tar", members)
    write_shard(tmp_path / "val.tar", samples(2))
    images = opened("wds/", tmp_path)
    assert images.train.targets == [1, 2, 0] and images.classes == 3  # type: ignore[attr-defined]
    for index, number in enumerate((1, 2, 3)):
        image, label = images.train[index]
        assert np.array_equal(np.array(image), np.array(picture(label, number)))
    assert images.name_of(images.train, 2).endswith(f"'{'long/' * 40}x.png'")


def test_labels_may_be_under_another_key(tmp_path: Path) -> None:
    members = []
    for number, label in enumerate([4, -1, 2]):
        text = json.dumps({"label": 99, "other": label}).encode()
        members += [(f"{number}.png", png(0, number)), (f"{number}.json", text)]
    write_shard(tmp_path / "a.tar", members)
    split = {"filenames": ["a.tar"], "num_samples": 3, "alt_label": "other"}
    info = {"splits": {"train": split, "test": split}, "num_classes": 9}
    (tmp_path / "info.json").write_text(json.dumps(info))
    images = opened("wds/", tmp_path)
    assert images.train.targets == [4, 2] and images.classes == 9  # type: ignore[attr-defined]


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def overwrite(path: Path, begin: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[begin : begin + len(content)] = content
    path.write_bytes(whole)


def shorten(path: Path) -> None:
    """The last member, an empty one, gets a size below 0, which leads back to the first."""
    with tarfile.open(path, "w") as tar:
        for name in ("x.png", "y.png"):
            tar.addfile(tarfile.TarInfo(name))
    header = tarfile.TarInfo("y.png").tobuf(tarfile.GNU_FORMAT)
    size = b"\xff" * 10 + (2**16 - 1024).to_bytes(2, "big")
    header = header[:124] + size + header[136:148] + b" " * 8 + header[156:]
    header = header[:148] + b"%06o\0 " % sum(header) + header[156:]
    overwrite(path, 512, header)


SHARD = "colours-train-0001.tar"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda at: cut(at / SHARD, 700), f"{SHARD} cannot be read: it is cut short"),
    "cut between members": (lambda at: cut(at / SHARD, 4096), f"{SHARD} cannot be read"),
    "empty": (lambda at: cut(at / SHARD, 0), f"{SHARD} cannot be read"),
    "a damaged header": (lambda at: overwrite(at / SHARD, 2048, b"\xff" * 512), "cannot be read"),
    "a size below 0": (lambda at: shorten(at / SHARD), "'y.png' would have -1024 bytes"),
    "no tar": (lambda at: (at / SHARD).write_bytes(b"<html>" * 999), f"{SHARD} cannot be read"),
    "compressed": (lambda at: tarfile.open(at / SHARD, "w:gz").close(), f"{SHARD} cannot be read"),
    "a folder": (lambda at: (at / "x-train.tar").mkdir(), "x-train.tar cannot be read"),
    "no label": (lambda at: write_shard(at / SHARD, samples(2)[:3]),
                 f"{SHARD}: '00001' has no label (no 'json'); put a .cls with the number"),
    "a word": (lambda at: write_shard(at / SHARD, [("x.png", b""), ("x.cls", b"cat")]),
               "'x' has no label (invalid literal"),
    "below 0": (lambda at: write_shard(at / SHARD, [("x.png", b""), ("x.cls", b"-1")]),
                "'x' has no label (-1 is not a class"),
    "no class": (lambda at: write_shard(at / SHARD, [("x.png", b""), ("x.cls", b"9" * 4000)]),
                 "'x' has no label ("),
    "a long one": (lambda at: write_shard(at / SHARD, [("x.png", b""), ("x.cls", b"1" * 2**21)]),
                   "its .cls has 2097152 bytes"),
    "deep": (lambda at: write_shard(at / SHARD, [("x.png", b""), ("x.json", b"[" * 10**5)]),
             "'x' has no label ("),
    "no held-out": (lambda at: (at / "colours-val-0000.tar").unlink(), "has the splits train, and"),
    "none": (lambda at: [path.unlink() for path in at.glob("*.tar")], "has no shard such as"),
    "no image": (lambda at: write_shard(at / "colours-val-0000.tar", []),
                 "val has no images, in 1 shards"),
    "info of another kind": (lambda at: (at / "_info.json").write_text('{"splits": {"train": 3}}'),
                             "has no splits in timm's form"),
    "info that is none": (lambda at: (at / "_info.json").write_text("{"), "_info.json cannot be"),
    "too few classes": (lambda at: (at / "_info.json").write_text('{"num_classes": 2}'),
                        "sets num_classes to 2, and an image has the label 2"),
    "too few images": (
        lambda at: (at / "_info.json").write_text(json.dumps({"splits": {
            split: {"filenames": [SHARD], "num_samples": 25} for split in ("train", "val")
        }})), "train has 24 images of the 25 that _info.json records",
    ),
    "a command": (
        lambda at: (at / "_info.json").write_text(json.dumps({"splits": {
            split: {"filenames": [f"pipe:touch {at}/ran"]} for split in ("train", "val")
        }})), "ran cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_shards_are_named(tmp_path: Path, name: str) -> None:
    harm, says = BAD[name]
    harm(write_shards(tmp_path))
    with pytest.raises(MotleyError) as error:
        opened("wds/", tmp_path)
    assert says in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_hostile_names_reach_nothing(tmp_path: Path) -> None:
    shard = write_shards(tmp_path / "in") / SHARD
    with tarfile.open(shard, "w") as tar:
        for name, kind, link in (
            ("x.png", tarfile.SYMTYPE, "/etc/passwd"), ("x.cls", tarfile.LNKTYPE, "/etc/passwd"),
            ("y.png", tarfile.FIFOTYPE, ""), ("z.png", tarfile.CHRTYPE, ""),
        ):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            tar.addfile(member)
    members = [("../../out.png", b"torn"), ("../../out.cls", b"0"), ("\x1b[2J/é.png", b"torn"),
               ("\x1b[2J/é.cls", b"0")]  # fmt: skip
    write_shard(tmp_path / "in" / "more-train-0.tar", members)
    images = opened("wds/", tmp_path / "in")
    assert len(images.train) == 24 + 2 and not list(tmp_path.rglob("out.*"))
    assert images.name_of(images.train, 24).endswith(r"'../../out.png'")
    assert images.name_of(images.train, 25).endswith(r"'\x1b[2J/\xe9.png'")


def test_an_image_that_is_torn_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_shard(tmp_path / "colours-train-0000.tar", [("x.png", png(0, 0)[:60]), ("x.cls", b"0")])
    images = opened("wds/", tmp_path)
    with pytest.raises(UnreadableSample):
        read(images.train, 0)
    assert images.name_of(images.train, 0).endswith("colours-train-0000.tar: 'x.png'")


def test_a_shard_that_changed_is_an_unreadable_image(tmp_path: Path) -> None:
    images = opened("wds/", write_shards(tmp_path))
    cut(tmp_path / SHARD, 0)
    with pytest.raises(UnreadableSample):
        read(images.train, 40)
    assert images.name_of(images.train, 40)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_images_of_any_colours_become_rgb(tmp_path: Path, mode: str) -> None:
    write_shards(tmp_path)
    path = tmp_path / "x.png"
    Image.new(mode, (5, 4), 1).save(path)
    members = [("x.png", path.read_bytes()), ("x.cls", b"0")]
    write_shard(tmp_path / "colours-train-0000.tar", members)
    assert opened("wds/", tmp_path).train[0][0].mode == "RGB"
