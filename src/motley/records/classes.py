"""The accuracy of each class and the confusion matrix of a run's last evaluation, as CSV files.

Both files list counts of held-out samples, which are exact on any ranks. The first file,
``classes.csv``, has a line a class. The second, ``confusion.csv``, has a line for each pair of a
label and a predicted class that occurs. Its size is therefore bounded by the number of samples.
"""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence

from motley.records.run_folder import RunFolder

Pairs = Mapping[tuple[int, int], int]  # number of samples, by label and predicted class


def write_classes(folder: RunFolder, pairs: Pairs, names: Sequence[str]) -> None:
    """Write both files.

    Args:
        folder: the run's folder.
        pairs: the counts.
        names: names of the classes by number; empty if they have none.
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
