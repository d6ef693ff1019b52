"""Labels of a CSV file as people have them, and what is said of the files that do not fit."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from motley.data.labels import open_held_out_file, open_labelled, read_class_weights
from motley.data.source import Order
from motley.errors import MotleyError
from motley.tasks.builtin.image import ImageTask
from motley.tasks.targets import ClassTarget, LabelsTarget, ValueTarget


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twelve images in two folders."""
    for number in range(12):
        folder = tmp_path / "images" / ("a" if number % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (20 * number, 0, 0)).save(folder / f"i{number}.png")
    return tmp_path / "images"


def write(root: Path, text: str) -> Path:
    path = root.parent / "labels.csv"
    path.write_text(text)
    return path


def rows(label: object = "cat", *, header: str = "file,label", ending: str = ".png") -> str:
    """A line for each image; every second is of another class."""
    lines = [f"i{n}{ending},{label if n % 3 else 'dog'}" for n in range(12)]
    return "\n".join([header, *lines]) + "\n"


def test_a_file_is_found_by_path_name_or_stem_and_a_tenth_is_held_out(root: Path) -> None:
    for text in (
        rows(), rows(header="image_id,tags", ending=""),
        rows().replace(",", ";").replace("\n", "\r\n"),
        "\ufeff" + rows().replace("i3.png", "a/i3.png"),
        rows().replace("i3.png", str(root / "a" / "i3.png")).replace("i1.png", "a\\i1.png"),
    ):  # fmt: skip
        images = open_labelled(root, write(root, text), (), "class")
        assert images.class_names == ("cat", "dog") and len(images.train) + len(images.test) == 12
        assert 1 <= len(images.test) <= 4 and "by a hash of the name" in images.account
        again = open_labelled(root, write(root, text), (), "class")
        assert images.fingerprint() == again.fingerprint()
    picture, label = images.train[0]
    assert picture.size == (9, 9) and label in (0, 1)


def test_what_is_missing_on_either_side_is_counted_and_named(root: Path) -> None:
    text = rows().replace("i4.png,cat\n", "") + "gone1.png,cat\ngone2.png,dog\n../x.png,cat\n"
    images = open_labelled(root, write(root, text), (), "class")
    assert "3 files of the CSV are missing: gone1.png, gone2.png, ../x.png" in images.account
    assert "1 images have no label: b/i4.png" in images.account
    many = rows() + "".join(f"gone{n}.png,cat\n" for n in range(30))
    account = open_labelled(root, write(root, many), (), "class").account
    assert "30 files of the CSV are missing: gone0.png" in account and "and 20 more" in account
    with pytest.raises(MotleyError, match=r"names 12 files, and .* has none of them"):
        open_labelled(root, write(root, rows(ending=".tif")), (), "class")


def test_splits_come_from_a_column_or_from_folders(root: Path) -> None:
    lines = [f"i{n}.png,{n % 2},{('train', 'val', 'test')[n % 3]}" for n in range(12)]
    file = write(root, "\n".join(["file,label,split", *lines]))
    images = open_labelled(root, file, (), "class")
    assert (len(images.train), len(images.test)) == (4, 4)
    assert "4 of another split are left out" in images.account
    (root / "a").rename(root / "train")
    (root / "b").rename(root / "val")
    lines = [f"{'train' if n % 2 else 'val'}/i{n}.png,{n % 3}" for n in range(12)]
    images = open_labelled(root, write(root, "\n".join(["file,label", *lines])), (), "class")
    assert (len(images.train), len(images.test), images.class_names) == (6, 6, ("0", "1", "2"))


def test_several_labels_and_numbers(root: Path) -> None:
    lines = [f"i{n}.png,{'sea|sun' if n % 2 else 'sun'}" for n in range(11)] + ["i11.png,"]
    text = "\n".join(["file,label", *lines, "i0.png,new york"])
    images = open_labelled(root, write(root, text), (), "labels")
    assert images.class_names == ("new york", "sea", "sun")
    labels = {Path(path).name: label.tolist() for part in (images.train, images.test)
              for path, label in part.samples}  # type: ignore[attr-defined]  # fmt: skip
    assert labels["i0.png"] == [1, 0, 1] and labels["i1.png"] == [0, 1, 1]
    assert labels["i11.png"] == [0, 0, 0]
    lines = [f"i{n}.png,{n / 7}" for n in range(12)]
    first = open_labelled(root, write(root, "\n".join(["file,age", *lines])), (), "value")
    assert first.train.targets[0] != int(first.train.targets[0])  # type: ignore[attr-defined]
    lines[0] = "i0.png,0.4"
    other = open_labelled(root, write(root, "\n".join(["file,age", *lines])), (), "value")
    assert first.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(("text", "kind", "columns", "says"), [
    ("a,b,c\n1,2,3\n", "class", (), "no column has the name file; its columns are a, b, c"),
    (rows(), "class", ("file", "lable"), "has no column lable .nearest: label.; its columns are"),
    (rows() + "i1.png,dog\n", "class", (), "line 14: i1.png has the label 'dog'"),
    (rows() + ",dog\n", "class", (), "line 14 names no file"),
    (rows().replace("i4.png,cat", "i4.png,"), "class", (), "line 6: i4.png has no label"),
    (rows().replace("i4.png,cat", "i4.png"), "class", (), "line 6 has 1 cell, and the header"),
    (rows("dog"), "class", (), "has 1 different labels"),
    (rows(), "value", (), "line 11: 'dog' for i9.png is not a number|'cat' for i1"),
    ("file,label\n", "class", (), "has no rows"),
    ("file,label,split\ni1.png,a,trian\ni2.png,b,val\n", "class", (),
     "line 2: the split 'trian' is unknown"),
    ("file,label,split\ni1.png,a,train\ni2.png,b,train\n", "class", (),
     "the file assigns no image to held out"),
])  # fmt: skip
def test_bad_files_are_refused_with_their_line(
    root: Path, text: str, kind: str, columns: tuple[str, ...], says: str
) -> None:
    with pytest.raises(MotleyError, match=says):
        open_labelled(root, write(root, text), columns, kind)


def test_a_name_that_fits_two_images_and_a_file_that_is_no_text(root: Path) -> None:
    Image.new("RGB", (9, 9)).save(root / "a" / "i0.png")
    with pytest.raises(
        MotleyError, match=r"line 2: several files fit i0\.png: a/i0\.png, b/i0\.png; write"
    ):
        open_labelled(root, write(root, rows()), (), "class")
    binary = root.parent / "labels.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MotleyError, match="the file is not UTF-8 text"):
        open_labelled(root, binary, (), "class")
    with pytest.raises(MotleyError, match="No such file"):
        open_labelled(root, root / "none.csv", (), "class")


def test_a_further_set_has_the_classes_of_the_training(root: Path) -> None:
    images = open_labelled(root, write(root, rows()), (), "class")
    night = write(root, "file,label\ni1.png,dog\n")
    assert open_held_out_file(images, "night", root, night, ()).targets == [1]  # type: ignore[attr-defined]
    with pytest.raises(MotleyError, match="line 2: bird is not a class of the training data"):
        open_held_out_file(images, "x", root, write(root, "file,label\ni1.png,bird\n"), ())
    with pytest.raises(MotleyError, match=r"--eval-data x=.*: of 1 files, 1 are not in"):
        open_held_out_file(images, "x", root, write(root, "file,label\ngone.png,dog\n"), ())


def test_class_weights_are_balanced_read_or_refused(root: Path) -> None:
    images = open_labelled(root, write(root, rows()), (), "class")
    counts = Counter(images.train.targets)  # type: ignore[attr-defined]
    weights = read_class_weights("balanced", images)
    assert sum(weights[label] * count for label, count in counts.items()) == pytest.approx(
        len(images.train)
    )
    assert weights[0] * counts[0] == pytest.approx(weights[1] * counts[1])
    assert read_class_weights("1,2.5", images) == [1, 2.5]
    file = root / "weights.txt"
    file.write_text("dog,3\ncat,1\n")
    assert read_class_weights(str(file), images) == [1, 3]
    file.write_text("4\n5\n")
    assert read_class_weights(str(file), images) == [4, 5]
    for text, says in (
        ("1,2,3", "has 3 weights, and the data has 2 classes"), ("1,-2", "of 0 or more"),
        ("0,0", "at least one of them above 0"), ("balnced", "neither balanced, nor the path"),
        ("nan,1", "of 0 or more"),
    ):  # fmt: skip
        with pytest.raises(MotleyError, match=says):
            read_class_weights(text, images)


def test_a_weighted_loss_is_torchs_own() -> None:
    dice = torch.Generator().manual_seed(0)
    outputs, labels = torch.randn(9, 3, generator=dice), torch.arange(9) % 3
    weight = torch.tensor([1.0, 0.2, 4.0])
    target = ClassTarget((), 0.1, weight, ())
    weights = target.weights(labels)
    assert weights is not None
    own = target.losses(outputs, labels).sum() / weights.sum()
    due = functional.cross_entropy(outputs, labels, weight, label_smoothing=0.1)
    assert own.item() == pytest.approx(due.item(), rel=1e-6)
    several = (torch.rand(9, 3, generator=dice) > 0.5).float()
    own = LabelsTarget("abc", weight, ()).losses(outputs, several).mean()
    due = functional.binary_cross_entropy_with_logits(outputs, several, pos_weight=weight)
    assert own.item() == pytest.approx(due.item(), rel=1e-6)


@pytest.mark.parametrize("threshold", [None, 0.2])
def test_a_binary_loss_is_timms_for_mixed_images_too(threshold: float | None) -> None:
    from timm.data.mixup import mixup_target
    from timm.loss import BinaryCrossEntropy

    dice = torch.Generator().manual_seed(0)
    outputs, labels = torch.randn(6, 4, generator=dice), torch.tensor([0, 3, 1, 2, 2, 0])
    target = ClassTarget((), 0.1, None, (), is_binary=True, threshold=threshold)
    timms = BinaryCrossEntropy(smoothing=0.1, target_threshold=threshold)
    assert target.losses(outputs, labels).mean().item() == pytest.approx(
        timms(outputs, labels).item(), rel=1e-6
    )
    soft = mixup_target(labels, 4, lam=0.3, smoothing=0.1)
    own = target.mixed_losses(outputs, labels, labels.flip(0), torch.full((6,), 0.3)).mean()
    due = BinaryCrossEntropy(target_threshold=threshold)(outputs, soft)
    assert own.item() == pytest.approx(due.item(), rel=1e-6)


def test_metrics_of_labels_and_values() -> None:
    from sklearn.metrics import average_precision_score, r2_score

    dice = torch.Generator().manual_seed(0)
    chances, several = torch.rand(40, 3, generator=dice), torch.rand(40, 3, generator=dice) > 0.4
    found = LabelsTarget("abc", None, ()).compute_metrics(chances, several.float())
    assert found["map"] == pytest.approx(average_precision_score(several, chances))
    outputs, values = torch.randn(40, 1, generator=dice), 1000 + torch.randn(40, generator=dice)
    target = ValueTarget("mse", ())
    sums = {name: float(each.mean()) for name, each in target.scores(outputs, values).items()}
    summary = target.summary(sums)
    assert summary["r2"] == pytest.approx(
        r2_score(values.double(), outputs[:, 0].double()), rel=1e-6
    )
    assert summary["mae"] == pytest.approx(float((outputs[:, 0] - values).abs().mean()), rel=1e-6)


def test_balanced_epochs_have_equally_many_of_each_class() -> None:
    classes = [0] * 50 + [1] * 7 + [2] * 3
    order = Order(60, seed=4, classes=classes)
    epochs = [order.epoch(epoch) for epoch in range(20)]
    for epoch in epochs:
        assert Counter(classes[index] for index in epoch) == {0: 20, 1: 20, 2: 20}
        times = Counter(epoch)
        for label in range(3):
            own = [times[index] for index in range(60) if classes[index] == label]
            assert max(own) - min(own) <= 1
    assert epochs[0] != epochs[1] and epochs[0] == Order(60, seed=4, classes=classes).epoch(0)
    assert len({index for epoch in epochs for index in epoch}) == 60, "all are drawn in time"
    part = Order(60, seed=4, fraction=0.5, classes=classes)
    assert len(part.epoch(0)) == 30 and set(part.epoch(1)) <= set(
        Order(60, seed=4, fraction=0.5).epoch(0)
    )


@pytest.mark.parametrize(("options", "says"), [
    ({"target": "value"}, "--target value needs labels from a CSV file"),
    ({"label_columns": ("a", "b")}, "--label-columns needs labels from a CSV file"),
    ({"labels": "x.csv", "dataset": "synthetic"}, "--dataset synthetic has its own labels"),
    ({"labels": "x.csv", "label_columns": ("a",)}, "give the column of the file"),
    ({"metrics": ("r2",)}, "--metrics r2 does not apply to --target class; choose auroc"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        ImageTask(**options).check_options()  # type: ignore[arg-type]


def test_balance_and_classes_need_one_class_for_each_image(root: Path) -> None:
    several = write(root, rows("cat|dog"))
    task = ImageTask(labels=str(several), data_dir=str(root), target="labels",
                     balanced_sampling=True, classes=(0, 1))  # fmt: skip
    with pytest.raises(
        MotleyError, match=r"--classes: with --target .* an image has no single class"
    ):
        _ = task.images
    task = ImageTask(labels=str(several), data_dir=str(root), target="labels",
                     balanced_sampling=True)  # fmt: skip
    with pytest.raises(MotleyError, match="--balanced-sampling needs one class for each image"):
        task.balanced_classes()
    assert np.shape(task.images.train.targets)[1] == 2  # type: ignore[attr-defined]
