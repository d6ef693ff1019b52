"""Images below a folder, with their labels in a CSV file.

A label is a class, several labels, or a number. The CSV file identifies an image by its path below
the folder or by its file name, with or without the ending. Each host finds the same images in the
same order.
"""

import hashlib
import math
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motley.data.datasets import CLASS, HELD_OUT, LABELS, TRAIN, VALUE
from motley.data.images import Images, composed, image_endings, is_foreign, load_image
from motley.data.source import Source
from motley.data.tables import CsvFile
from motley.errors import MotleyError
from motley.text import did_you_mean, name_some

_FILE = ("file", "filename", "file_name", "image", "image_id", "path", "img", "name", "id")
_LABEL = ("label", "labels", "class", "category", "target", "tags", "value", "y")
_SPLIT = ("split", "set", "subset", "fold")
_MEANS = {"training": TRAIN, "held_out": "test", "eval": "val", "dev": "val"}
_NAMED = 10  # files that a message names
_TENTH = 10  # one image in so many is held out where the file does not say which


@dataclass(frozen=True)
class _Row:
    """A row of the CSV file: its line number, the name of an image, a label and a split."""

    line: int
    name: str
    label: str
    split: str


class LabelledFiles:
    """A source of image files with labels.

    Attributes:
        root: folder of the images.
        samples: path and label of each image.
    """

    def __init__(
        self, root: Path, samples: Sequence[tuple[str, Any]], load: Callable[[str], Any]
    ) -> None:
        self.root, self.samples, self._load = root, list(samples), load

    @property
    def targets(self) -> list[Any]:
        """Label of each sample. The attribute has the name that torchvision uses."""
        return [label for _, label in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path, label = self.samples[index]
        return self._load(path), torch.from_numpy(label) if isinstance(label, np.ndarray) else label


def open_labelled(root: Path, file: Path, columns: Sequence[str], kind: str) -> Images:
    """Return the images of a folder that a CSV file labels.

    The column ``split`` decides which images are held out. Without the column, the folders
    ``train`` and ``val`` decide. Without these folders, the hashes of the names select a tenth of
    the images.

    Args:
        root: folder of the images.
        file: the CSV file.
        columns: names of the columns for file, label and split; empty: the usual names.
        kind: ``class``, ``labels`` or ``value``.

    Raises:
        MotleyError: the file cannot be read or is not valid, or no image is left to train on.
    """
    rows = _read(file, columns)
    index = _Index(root)
    found, missing = index.find(rows, file)
    if not found:
        raise MotleyError(
            f"--labels {file} names {len(rows):,} files, and {root} has none of them, such as "
            f"{name_some([row.name for row in rows], 2)}; name the folder of the images with "
            "--data-dir"
        )
    labels, names = _read_labels(found, file, kind, None)
    split, by = _split(found, file)
    kept = [at for at, name in enumerate(split) if name]
    train, test = (
        LabelledFiles(
            root, [(found[at][1], labels[at]) for at in kept if (split[at] == TRAIN) == trains],
            load_image,
        )
        for trains in (True, False)
    )  # fmt: skip
    for part, word in ((train, "to train on"), (test, "held out")):
        if not len(part):
            raise MotleyError(
                f"--labels {file}: the file assigns no image to {word}; add a column named "
                f"split that has {TRAIN} or {HELD_OUT[1]} in each row"
            )
    without = index.list_others(path for _, path in found)
    words = [_count(len(train), kind, names, len(test)) + by]
    if missing:
        words.append(_name("files of the CSV are missing", [row.name for row in missing]))
    if without:
        words.append(_name("images have no label", without))
    if left := len(found) - len(kept):
        words.append(f"{left:,} of another split are left out")
    if kind == CLASS and (unseen := set(range(len(names))) - set(train.targets)):
        words.append(f"no training image of {name_some([names[each] for each in sorted(unseen)])}")
    return Images(
        train, test, classes=max(1, len(names)), channels=3, mean=None, std=None, native_size=None,
        class_names=names, account="; ".join(words), kind=kind,
        name_of=lambda source, index: str(source.samples[index][0]),  # type: ignore[attr-defined]
    )  # fmt: skip


def open_held_out_file(
    images: Images, name: str, root: Path, file: Path, columns: Sequence[str]
) -> Source:
    """Return an additional held-out set: the images of a folder that a CSV file names.

    Args:
        images: the images that are trained on, with their classes.
        name: name of the set.
        root: folder of the images.
        file: the CSV file. All of its rows are used.
        columns: see :func:`open_labelled`.

    Raises:
        MotleyError: the file is not valid, names a missing image, or has other classes.
    """
    rows = _read(file, columns)
    found, missing = _Index(root).find(rows, file)
    if missing or not found:
        raise MotleyError(
            f"--eval-data {name}={file}: of {len(rows):,} files, "
            + _name(f"are not in {root}", [row.name for row in missing])
        )
    labels, _ = _read_labels(found, file, images.kind, images.class_names)
    pairs = zip((path for _, path in found), labels, strict=True)
    return LabelledFiles(root, list(pairs), load_image)


def _name(words: str, names: Sequence[str]) -> str:
    """Return a text with a count and up to ten names: ``3 images have no label: a, b, c``."""
    return f"{len(names):,} {words}: {name_some(names, _NAMED)}"


def _count(images: int, kind: str, names: Sequence[str], held_out: int) -> str:
    of = {CLASS: f" of {len(names)} classes", LABELS: f" with {len(names)} labels"}.get(kind, "")
    return f"{images:,} images{of}, {held_out:,} held out"


def _read(file: Path, columns: Sequence[str]) -> list[_Row]:
    """Return the rows of a CSV file. The header shows which character is the delimiter."""
    table = CsvFile(file, f"--labels {file}")
    places = _find_columns(file, table.names, columns)
    rows = list[_Row]()
    for cells in table.rows(1 + max(each for each in places if each is not None)):
        if not any(map(str.strip, cells)):
            continue
        name, label, split = ("" if at is None else cells[at].strip() for at in places)
        if not name or "\0" in name:
            raise MotleyError(f"{file}, line {table.line} names no file; remove the line")
        rows.append(_Row(table.line, name, label, split.lower()))
    if not rows:
        raise MotleyError(f"--labels {file} has no rows; write one line per image, as in a.jpg,cat")
    return rows


def _find_columns(
    file: Path, header: Sequence[str], given: Sequence[str]
) -> tuple[int, int, int | None]:
    """Return the positions of the columns for file, label and split. None: no column for split."""
    if given:
        for name in given:
            if name not in header:
                raise MotleyError(
                    f"--label-columns: {file} has no column {name}{did_you_mean(name, header)}; "
                    f"its columns are {', '.join(header)}"
                )
        places = [header.index(name) for name in given]
        return places[0], places[1], places[2] if len(places) > 2 else None
    small = [name.lower() for name in header]

    def find(usual: Collection[str]) -> int | None:
        return next((small.index(name) for name in usual if name in small), None)

    at, label = find(_FILE), find(_LABEL)
    if (at is None or label is None) and len(header) == 2:
        at, label = 0, 1
    if at is None or label is None:
        raise MotleyError(
            f"--labels {file}: no column has the name {('file' if at is None else 'label')}; its "
            f"columns are {', '.join(header)}. Name two of them, as in --label-columns "
            f"{','.join([*header, 'file', 'label'][:2])}"
        )
    return at, label, find(_SPLIT)


class _Index:
    """An index of the images below a folder.

    The keys are the paths and the file names of the images, each with and without the ending.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise MotleyError(f"--data-dir {root} is not a folder; name the folder of the images")
        endings, self._root = image_endings(), root
        self.paths = dict[str, str]()  # full path, by the composed path below the folder
        for here, folders, names in os.walk(root):
            folders[:] = sorted(each for each in folders if not is_foreign(each))
            for name in names:
                if name.lower().endswith(endings) and not is_foreign(name):
                    path = os.path.join(here, name)  # noqa: PTH118 - a thousand times a millisecond
                    self.paths[composed(os.path.relpath(path, root).replace(os.sep, "/"))] = path
        self._short = dict[str, list[str]]()
        for each in self.paths:
            stem, name = each.rpartition(".")[0], posixpath.basename(each)
            for short in {stem, name, name.rpartition(".")[0]} - {each}:
                self._short.setdefault(short, []).append(each)

    def find(self, rows: Sequence[_Row], file: Path) -> tuple[list[tuple[_Row, str]], list[_Row]]:
        """Return the rows whose image exists, with the image's path, and the rows without an image.

        Raises:
            MotleyError: a name matches several images.
        """
        found, missing = list[tuple[_Row, str]](), list[_Row]()
        for row in rows:
            name = posixpath.normpath(composed(row.name.replace("\\", "/")))
            if posixpath.isabs(name):
                name = os.path.relpath(name, self._root)
            others = [name] if name in self.paths else self._short.get(name, [])
            if len(others) > 1:
                raise MotleyError(
                    f"{file}, line {row.line}: several files fit {row.name}: "
                    f"{name_some(sorted(others))}; write the file's path, relative to {self._root}"
                )
            if others:
                found.append((row, self.paths[others[0]]))
            else:
                missing.append(row)
        return sorted(found, key=lambda pair: composed(pair[1])), missing

    def list_others(self, paths: Any) -> list[str]:
        """Return the names of the images that are not among these paths."""
        known = set(paths)
        return sorted(name for name, path in self.paths.items() if path not in known)


def _read_labels(
    found: list[tuple[_Row, str]], file: Path, kind: str, known: Sequence[str] | None
) -> tuple[list[Any], tuple[str, ...]]:
    """Return the label of each image, and the names of the classes.

    The labels of several rows of one image are joined. Afterwards ``found`` has one row per image.

    Args:
        found: rows with their images' paths, sorted by path. The list is changed in place.
        file: the CSV file, for messages.
        kind: kind of the labels.
        known: names of the classes that are trained; None: use the classes in the file.
    """
    texts, first = dict[str, list[str]](), dict[str, _Row]()
    for row, path in found:
        before = texts.setdefault(path, [])
        if kind != LABELS and before and before[0] != row.label:
            raise MotleyError(
                f"{file}, line {row.line}: {row.name} has the label {row.label!r} here, and "
                f"{before[0]!r} in line {first[path].line}; keep one of the two, or add --target "
                f"{LABELS}"
            )
        if kind != LABELS and not row.label:
            raise MotleyError(
                f"{file}, line {row.line}: {row.name} has no label; add one, or remove the line"
            )
        before.append(row.label)
        first.setdefault(path, row)
    found[:] = [(first[path], path) for path in texts]
    if kind == VALUE:
        return [_number(first[path], values[0], file) for path, values in texts.items()], ()
    if kind == LABELS:
        separator = _find_separator(row.label for row, _ in found)
        parts = {
            path: {each for text in values for each in _cut(text, separator)}
            for path, values in texts.items()
        }
    else:
        parts = {path: {composed(values[0])} for path, values in texts.items()}
    names = tuple(known or _sort(set().union(*parts.values())))
    if len(names) < (2 if kind == CLASS else 1):
        raise MotleyError(
            f"{file} has {len(names)} different labels, and a classifier needs at least two. Name "
            "the column of the labels with --label-columns, or for numbers add --target value"
        )
    place = {name: number for number, name in enumerate(names)}
    for path, own in parts.items():
        if unknown := own - place.keys():
            raise MotleyError(
                f"{file}, line {first[path].line}: {name_some(sorted(unknown))} is not a class of "
                f"the training data; its classes are {name_some(names)}"
            )
    if kind == CLASS:
        return [place[next(iter(own))] for own in parts.values()], names
    result = list[Any]()
    for own in parts.values():
        row_of = np.zeros(len(names), dtype=np.float32)
        row_of[[place[each] for each in own]] = 1
        result.append(row_of)
    return result, names


def _number(row: _Row, text: str, file: Path) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise MotleyError(
            f"{file}, line {row.line}: {text!r} for {row.name} is not a number; correct it, or "
            "name the column of the numbers with --label-columns"
        )
    return value


def _find_separator(texts: Any) -> str:
    """Return the character that separates several labels in a cell.

    The result is a space if no other separator occurs in the texts.
    """
    count = Counter(letter for text in texts for letter in text if letter in "|;,")
    return next((each for each in "|;," if count[each]), " ")


def _cut(text: str, separator: str) -> list[str]:
    return [composed(each.strip()) for each in text.split(separator) if each.strip()]


def _sort(names: Collection[str]) -> list[str]:
    """Return the names in order. If all names are numbers, the order is by value."""
    is_number = all(re.fullmatch(r"-?\d{1,18}", name) for name in names)
    return sorted(names, key=int) if is_number else sorted(names)


def _split(found: Sequence[tuple[_Row, str]], file: Path) -> tuple[list[str], str]:
    """Return the split of each image, and a note if hashes decide the split.

    The split is an empty text for an image that is left out. The note is empty if the CSV file or
    the folders decide the split.
    """
    own = [_MEANS.get(row.split, row.split) for row, _ in found]
    if not any(own):
        own = [row.name.replace("\\", "/").removeprefix("./").partition("/")[0] for row, _ in found]
        if not set(own) <= {TRAIN, *HELD_OUT}:
            hashes = [hashlib.sha256(composed(row.name).encode()).digest() for row, _ in found]
            held_out = [int.from_bytes(each[:8], "big") % _TENTH == 0 for each in hashes]
            if not any(held_out):
                held_out[hashes.index(min(hashes))] = True
            return [HELD_OUT[1] if each else TRAIN for each in held_out], " by a hash of the name"
    for (row, _), name in zip(found, own, strict=True):
        if name not in {TRAIN, *HELD_OUT}:
            raise MotleyError(
                f"{file}, line {row.line}: the split {row.split!r} is unknown; write {TRAIN} or "
                f"{HELD_OUT[1]}"
            )
    held = next((name for name in HELD_OUT if name in own), "")
    return [name if name in (TRAIN, held) else "" for name in own], ""


def read_class_weights(text: str, images: Images) -> list[float]:
    """Return the weight of each class, or of each label's positive samples.

    With ``balanced``, a class's weight is inversely proportional to its number of training images,
    and the weights of all images sum to their number. With several labels per image, a label's
    weight is its number of negative images divided by its number of positive images.

    Args:
        text: ``balanced``, numbers separated by commas, or the path of a file with one number per
            line. A line may start with the class's name and a comma.
        images: the images.

    Raises:
        MotleyError: the text is not valid, or the numbers do not match the classes.
    """
    flag, classes = f"--class-weights {text}", images.classes
    if images.kind == VALUE:
        raise MotleyError(
            f"{flag} needs classes, and labels of --target value are numbers; leave out {flag}"
        )
    targets = getattr(images.train, "targets", None)
    if text == "balanced":
        if targets is None:
            raise MotleyError(
                f"{flag}: this data set does not list its labels, from which the weights are "
                "computed; give the weights as numbers"
            )
        if images.kind == LABELS:
            positive = np.sum(targets, axis=0)
            return list(((len(targets) - positive) / np.maximum(positive, 1)).astype(float))
        counts = np.bincount(np.asarray(targets), minlength=classes)
        return list(
            (len(targets) / (np.count_nonzero(counts) * np.maximum(counts, 1))).astype(float)
        )
    lines = text.split(",")
    if Path(text).is_file():
        lines = [each for each in Path(text).read_text(encoding="utf-8-sig").splitlines() if each]
        cells = [line.rpartition(",") for line in lines]
        if images.class_names and all(name for name, _, _ in cells):
            named = {composed(name.strip()): value for name, _, value in cells}
            if set(named) == set(images.class_names):
                cells = [("", "", named[name]) for name in images.class_names]
        lines = [value for _, _, value in cells]
    try:
        weights = [float(each) for each in lines]
    except ValueError:
        raise MotleyError(
            f"{flag} is neither balanced, nor the path of a file, nor a list of numbers such as "
            "1,2.5,1"
        ) from None
    if len(weights) != classes:
        raise MotleyError(
            f"{flag} has {len(weights)} weights, and the data has {classes} classes; give one "
            "weight per class"
        )
    if not all(0 <= each < math.inf for each in weights) or not sum(weights):
        raise MotleyError(f"{flag}: give weights of 0 or more, at least one of them above 0")
    return weights


def labels_to_balance(images: Images) -> list[int]:
    """Return the class of each training image, for ``--balanced-sampling``.

    Raises:
        MotleyError: the images have no classes, or the data set does not list the labels.
    """
    targets = getattr(images.train, "targets", None)
    if images.kind != CLASS or targets is None:
        reason = "an image has several labels or a number here" if images.kind != CLASS else (
            "this data set does not list its labels"
        )  # fmt: skip
        raise MotleyError(
            f"--balanced-sampling needs one class for each image, and {reason}; leave it out, or "
            "use --class-weights"
        )
    return [int(each) for each in targets]
