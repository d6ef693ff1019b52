"""Files on a run's last evaluation: results by class, confusion matrix, and worst samples.

``classes.csv`` has one line per class. ``confusion.csv`` has a line for each pair of a label and a
predicted class that occurs. The file has at most one line per sample. Both files list counts of
held-out samples. The counts are exact, whatever the number of ranks. ``worst.json`` has the samples
with the largest loss, at most 200.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder

MOST_WORST = 200
PNG, JPEG = "image/png", "image/jpeg"
_LARGEST = 2**24  # bytes of a file of worst samples that is read
Pairs = Mapping[tuple[int, int], int]  # number of samples, by label and predicted class


def write_classes(folder: RunFolder, pairs: Pairs, names: Sequence[str]) -> None:
    """Write ``classes.csv`` and ``confusion.csv``.

    Args:
        folder: the run's folder.
        pairs: number of held-out samples for each pair of a label and a predicted class.
        names: names of the classes by number; empty if the classes have no names.
    """
    samples, correct = Counter[int](), Counter[int]()
    for (label, predicted), count in pairs.items():
        samples[label] += count
        correct[label] += count * (label == predicted)
    known = range(len(names)) if names else sorted({each for pair in pairs for each in pair})
    with folder.classes_file.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(("class", "name", "samples", "correct", "accuracy"))
        for each in known:
            accuracy = correct[each] / samples[each] if samples[each] else ""
            name = names[each] if names else ""
            lines.writerow((each, name, samples[each], correct[each], accuracy))
    with folder.confusion_file.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(("label", "predicted", "samples"))
        lines.writerows((*pair, count) for pair, count in sorted(pairs.items()))


@dataclass(frozen=True)
class ClassResult:
    """The held-out samples of one class in the last evaluation.

    Attributes:
        name: name of the class, or its number.
        samples: number of samples with this label.
        accuracy: fraction of these samples that was predicted correctly, 0 to 1.
        mistaken_for: name of the wrong class that was predicted most often; empty if no wrong class
            was predicted.
        mistakes: number of this class's samples for which ``mistaken_for`` was predicted.
    """

    name: str
    samples: int
    accuracy: float
    mistaken_for: str
    mistakes: int


def read_classes(folder: RunFolder) -> list[ClassResult]:
    """Return the classes of the last evaluation that have samples, the least accurate first.

    The list is empty if the run has no such files, or they are damaged.
    """
    try:
        with folder.classes_file.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        with folder.confusion_file.open(newline="", encoding="utf-8") as file:
            pairs = [tuple(map(int, line.values())) for line in csv.DictReader(file)]
        names = {int(line["class"]): line["name"] or line["class"] for line in lines}
        wrong: dict[int, tuple[int, str]] = {}
        for label, predicted, count in pairs:
            if label != predicted and count > wrong.get(label, (0, ""))[0]:
                wrong[label] = count, names[predicted]
        result = []
        for line in lines:
            if samples := int(line["samples"]):
                mistakes, mistaken_for = wrong.get(int(line["class"]), (0, ""))
                accuracy = int(line["correct"]) / samples
                name = names[int(line["class"])]
                result.append(ClassResult(name, samples, accuracy, mistaken_for, mistakes))
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return []
    return sorted(result, key=lambda each: each.accuracy)


def write_worst(folder: RunFolder, samples: Sequence[JsonDict]) -> None:
    """Write the samples with the largest loss.

    Args:
        folder: the run's folder.
        samples: records with ``index``, ``name`` and ``loss``. Most records also have ``label``,
            ``predicted``, ``probability``, ``label_probability``, ``picture`` (base64) and
            ``picture_type``.
    """
    folder.worst_file.write_text(json.dumps(list(samples), indent=1) + "\n", encoding="utf-8")


def read_worst(folder: RunFolder) -> list[JsonDict]:
    """Return the samples with the largest loss; empty if the file is missing or damaged.

    A picture is dropped unless it is base64 of a known image type.
    """
    try:
        if folder.worst_file.stat().st_size > _LARGEST:
            return []
        content = json.loads(folder.worst_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    known = (
        [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    )
    result = []
    for each in known[:MOST_WORST]:
        data, kind = each.get("picture"), each.get("picture_type")
        is_picture = isinstance(data, str) and re.fullmatch(r"[A-Za-z0-9+/]+=*", data)
        if not is_picture or kind not in (PNG, JPEG):
            each = {key: value for key, value in each.items() if not key.startswith("picture")}
        result.append(each)
    return result
