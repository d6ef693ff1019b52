"""Images of Hugging Face's datasets, and data sets whose names begin alike."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_images import check_images, opened, png, save_folder

from motley.data.datasets import find_dataset, known_datasets
from motley.data.images import select_classes
from motley.data.source import UnreadableSample, read
from motley.errors import MotleyError

SPLITS = {"train": 9, "validation": 6}


@pytest.mark.parametrize("kind", ["saved", "parquet", "images", "own names"])
def test_hugging_face_folders_are_read_by_index(tmp_path: Path, kind: str) -> None:
    import datasets

    names = ("img", "kind") if kind == "own names" else ("image", "label")
    folder = save_folder(tmp_path / "Saved", SPLITS, names)
    if kind == "parquet":
        for split, part in datasets.load_from_disk(str(folder)).items():
            part.to_parquet(tmp_path / "Parquet" / "data" / f"{split}-00000-of-00001.parquet")
        folder = tmp_path / "Parquet"
    elif kind == "images":
        folder = tmp_path / "Images"
        for split, (first, count) in {"train": (0, 9), "validation": (1000, 6)}.items():
            for number in range(first, first + count):
                path = folder / split / "rgb"[number % 3] / f"{number:05}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(png(number % 3, number))
        images = opened(f"hfds/{folder}", tmp_path / "data")
        assert (len(images.train), len(images.test), images.classes) == (9, 6, 3)
        assert images.train.targets == [0, 0, 0, 1, 1, 1, 2, 2, 2]  # type: ignore[attr-defined]
        return
    images = opened(f"hfds/{folder}", tmp_path / "data")
    check_images(images, 1000, (9, 6))
    assert images.name_of(images.train, 4) == "image 4 of train"
    some = select_classes(images, (2, 0)).train
    assert [some[index][1] for index in range(4)] == [1, 0, 1, 0]


def test_labels_without_names_are_counted_over_both_splits(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "a", {"train": 2, "test": 3}, labels=None)
    assert opened(f"hfds/{folder}", tmp_path / "data").classes == 3  # 2 is held out alone


def test_what_was_fetched_once_needs_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    folder = save_folder(tmp_path / "owner" / "colours", SPLITS)
    find_dataset(f"hfds/{folder}").prepare(tmp_path / "data")
    (tmp_path / "data" / "colours").rename(tmp_path / "data" / "owner___colours")
    monkeypatch.chdir(tmp_path / "data")  # there no folder has that name
    before = datasets.config.HF_HUB_OFFLINE
    check_images(find_dataset("hfds/owner/colours").open(tmp_path / "data", 224), 1000, (9, 6))
    assert before == datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("counts", "known", "says"),
    [
        ({"train": 3}, {}, "has the splits train, and needs the splits train and val"),
        ({"test": 3}, {}, "has the splits test, and needs the splits train"),
        ({"train": 3, "test": 0}, {}, "cannot be loaded (ValueError: "),
        ({"train": 3, "test": 3}, {"labels": [0, -1, 1]}, "image 1 of train has the label -1"),
        ({"train": 3, "test": 3}, {"labels": [0, 1, None]}, "image 2 of train has the label None"),
        ({"train": 2, "test": 2}, {"labels": ["a", "b"]}, "has the label 'a'; give the number"),
        ({"train": 3, "test": 3}, {"names": ("image", "breed"), "labels": None},
         "no columns of type ClassLabel, and none has the name label; its columns are image"),
    ],
)  # fmt: skip
def test_what_no_run_can_be_of_is_said(
    tmp_path: Path, counts: dict[str, int], known: dict[str, Any], says: str
) -> None:
    folder = save_folder(tmp_path / "a", counts, **known)
    with pytest.raises(MotleyError) as error:
        opened(f"hfds/{folder}", tmp_path / "data")
    assert says in str(error.value)


def test_names_that_are_nothing_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name, says in {
        "": "is not a folder on this host; name a folder, or OWNER/NAME",
        "pandas": "is not a folder on this host",  # a format of theirs, which unpickles files
        "/none/at/all": "is not a folder on this host",
        "owner/none": r"cannot be loaded \(ConnectionError: Couldn't reach 'owner/none'",
    }.items():
        with pytest.raises(MotleyError, match=f"--dataset hfds/{name} {says}"):
            opened(f"hfds/{name}", tmp_path / "data")
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "train.pkl").write_bytes(b"cos\nmkdir\n(S'ran'\ntR.")
    with pytest.raises(MotleyError, match="cannot be loaded"):
        opened("hfds/pandas", tmp_path / "data")
    assert not (tmp_path / "ran").exists()
    single = save_folder(tmp_path / "one", SPLITS) / "train"
    with pytest.raises(MotleyError, match=r"a folder written by DatasetDict\.save_to_disk"):
        opened(f"hfds/{single}", tmp_path / "data")


def test_a_missing_package_and_an_old_timm_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = find_dataset(f"hfds/{tmp_path}")
    with monkeypatch.context() as patch:
        patch.setattr("timm.__version__", "1.0.20")
        with pytest.raises(MotleyError, match=r"needs timm 1\.0\.31, and 1\.0\.20 is installed"):
            dataset.prepare(tmp_path / "data")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for use in (lambda: dataset.prepare(tmp_path), lambda: dataset.open(tmp_path, 224)):
        with pytest.raises(
            MotleyError, match=r"needs a package that is not installed.* install datasets"
        ):
            use()


def test_an_image_that_is_torn_is_named(tmp_path: Path) -> None:
    import datasets

    torn = png(0, 0)[:60]
    column = {"image": [{"bytes": torn, "path": None}] * 2, "label": [0, 1]}
    kinds = datasets.Features(
        {"image": datasets.Image(decode=False), "label": datasets.Value("int64")}
    )
    part = datasets.Dataset.from_dict(column, kinds).cast_column("image", datasets.Image())
    datasets.DatasetDict(train=part, validation=part).save_to_disk(tmp_path / "a")
    images = opened(f"hfds/{tmp_path / 'a'}", tmp_path / "data")
    with pytest.raises(UnreadableSample):
        read(images.train, 0)
    assert images.name_of(images.train, 0) == "image 0 of train"


def test_knowing_their_names_imports_nothing_heavy() -> None:
    code = (
        "import sys; from motley.data.datasets import find_dataset; find_dataset('hfds/a/b'); "
        "find_dataset('wds/'); heavy = {'torch', 'timm', 'datasets', 'numpy'}; "
        "sys.exit(bool(heavy & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_found_by_how_they_begin() -> None:
    assert {"hfds/", "wds/"} < set(known_datasets())
    found = find_dataset("wds/a/b")
    assert (found.name, found.model, found.keeps, found.needs_workers) == (
        "wds/a/b", "vit_base_patch16_224", True, True,
    )  # fmt: skip
    for name, nearest in (("hdfs/x", "hfds/"), ("wds", "wds/"), ("digits/x", "digits")):
        with pytest.raises(MotleyError, match=rf"--dataset {name} is unknown \(nearest: {nearest}"):
            find_dataset(name)


def test_the_hub_is_asked_only_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    from motley.data import hf_datasets

    monkeypatch.setattr(hf_datasets, "ASKED_OFFLINE", False)
    for before in (True, False):  # transformers may have been imported, which suppresses requests
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", before)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", before)
        for allowed in (True, False):
            with hf_datasets.hub_access("--text hf:owner/name", allowed):
                assert datasets.config.HF_HUB_OFFLINE is constants.HF_HUB_OFFLINE is not allowed
            assert datasets.config.HF_HUB_OFFLINE is constants.HF_HUB_OFFLINE is before
    monkeypatch.setattr(hf_datasets, "ASKED_OFFLINE", True)
    with hf_datasets.hub_access("--text hf:owner/name", allowed=True):
        assert datasets.config.HF_HUB_OFFLINE
