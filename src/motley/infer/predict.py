"""Predict images or rows of a table with a trained model, in this process.

    python torch_dist/predict.py logs/RUN photos/
    python torch_dist/predict.py logs/RUN a.jpg b.jpg --top-k 3
    python torch_dist/predict.py EXPORTED photos/ --out classes.jsonl
    python torch_dist/predict.py logs/RUN rows.csv --out predicted.csv

RUN is the folder of a run or of one of its checkpoints. From a run, the command loads the newest
intact checkpoint. EXPORTED is a folder that torch_dist/export.py has written. This folder needs no
data set. The command also reads the images in subfolders. The command uses a GPU if the host has
one.

For images, the output has one line per file, with the classes and their probabilities. Tables
(.csv, .tsv, .jsonl, .parquet) need a run of a task that defines with_rows(). The output then has
one line per row, with the columns of the row and the predictions of the task.
"""

import argparse
import contextlib
import csv
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from motley.config.option import positive
from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.plan.precision import PRECISIONS
from motley.records.json_files import finite
from motley.tasks.builtin.image import crops
from motley.text import escape_unprintable, plural

if TYPE_CHECKING:
    from motley.data.source import Tensors
    from motley.data.tables import Row
    from motley.infer.predictor import Predictor, Trained
    from motley.tasks.task import Net, Task

CSV, JSON_LINES = "csv", "jsonl"
_EXPORTED = "config.json"


def open_model(path: Path, data_dir: str | None, averaged: bool) -> "Trained":
    """Open the model of a run or of a checkpoint, or the image model of an exported folder.

    Raises:
        MotleyError: the path has no model that can be opened.
    """
    from motley.infer.predictor import open_trained

    if (path / _EXPORTED).is_file() and not (path / "progress.json").is_file():
        return _open_exported(path)
    trained = open_trained(path, data_dir, averaged=averaged)
    for problem in trained.problems:
        print(f"motley: not used: {problem}", file=sys.stderr)
    return trained


def _open_exported(folder: Path) -> "Trained":
    """Open the model in a folder that torch_dist/export.py or timm has written."""
    import torch

    from motley.data.datasets import CLASS
    from motley.data.images import Images, InMemory
    from motley.data.import_timm import timm
    from motley.data.transforms import Look
    from motley.infer.predictor import Trained
    from motley.tasks.builtin.image import ImageTask

    try:
        about = json.loads((folder / _EXPORTED).read_text())
        own = folder / "motley.json"
        kind = json.loads(own.read_text()).get("target", CLASS) if own.is_file() else CLASS
        known = about["pretrained_cfg"]
        channels, _, size = known["input_size"]
        task = ImageTask(name=about["architecture"], img_size=size)
        blank = InMemory(torch.zeros(1, channels, size, size, dtype=torch.uint8), torch.zeros(1))
        task.__dict__["images"] = Images(
            blank, blank, about["num_classes"], channels, None, None, None, augment=False,
            class_names=tuple(about.get("label_names") or ()), kind=kind,
        )  # fmt: skip
        task.__dict__["look"] = Look(
            size, tuple(known["mean"]), tuple(known["std"]), known["interpolation"],
            known["crop_pct"], known.get("crop_mode", "center"), augment=False,
        )  # fmt: skip
        if not (folder / "model.safetensors").is_file():  # timm would read a pickled file
            raise ValueError("it has no model.safetensors")
        net = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise MotleyError(
            f"{folder} was not written by torch_dist/export.py ({why}); write such a folder with: "
            "python torch_dist/export.py logs/RUN --to DIR"
        ) from None
    return Trained(folder, {}, task, net=net)


def predict_images(
    trained: "Trained",
    files: Sequence[Path],
    top_k: int,
    precision: str,
    batch: int,
    test_crops: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a record for each image that can be read, in the order of the files.

    Args:
        trained: an image model.
        files: the image files.
        top_k: number of classes in a record.
        precision: precision of the computation, or ``auto``.
        batch: number of images that are computed together.
        test_crops: number of crops of an image whose outputs are averaged; None: the number in the
            run's evaluations.
    """
    from motley.tasks.builtin.image import ImageTask

    if not isinstance(trained.task, ImageTask):
        raise MotleyError(
            f"{files[0]} is no table, and {trained.folder} is of another task than images "
            f"({trained.task.title()}); name a table for a task that defines with_rows(), a run of "
            "images, or predict the task's own samples with infer_vit.py"
        )
    task = trained.task.with_paths(files, test_crops=test_crops)
    predictor = _make_predictor(
        trained, task, precision, lambda net, part: {"record": task.rank(net, part, top_k)}
    )
    for items in _split(len(files), batch):
        for index, _, record in predictor.rows(items):
            assert isinstance(index, int) and isinstance(record, dict)
            yield {"file": str(files[index]), **record}


def predict_rows(
    trained: "Trained", rows: "Sequence[tuple[str, Row]]", precision: str, batch: int
) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row, and the predictions of the task.

    Each record has the columns of all rows, and None where its row lacks a column. If a prediction
    has the name of a column, ``_predicted`` is appended to the prediction's name.

    Args:
        trained: a model whose task defines ``with_rows``.
        rows: place of each row in its file, and the row.
        precision: precision of the computation, or ``auto``.
        batch: number of rows that are computed together.

    Raises:
        MotleyError: the task does not read rows, or a method of the task fails.
    """
    places, own = [place for place, _ in rows], [row for _, row in rows]
    with _naming_method(trained.task, "with_rows"):
        task = trained.task.with_rows(own)
        count = len(task.data(held_out=True))
    if count != len(own):
        raise MotleyError(
            f"the task {type(task).__name__} has {count:,} held-out samples after with_rows() got "
            f"{plural(len(own), 'row')}; return the rows in data(held_out=True)"
        )
    predictor = _make_predictor(trained, task, precision, partial(_predict_columns, task), places)
    columns = dict.fromkeys(name for row in own for name in row)
    names = [f"{x}_predicted" if x in columns else x for x in predictor.columns[2:]]
    for items in _split(count, batch):
        for index, _, *values in predictor.rows(items):
            assert isinstance(index, int)
            yield {**columns, **own[index], **dict(zip(names, values, strict=True))}


@contextlib.contextmanager
def _naming_method(task: "Task", method: str) -> Iterator[None]:
    """Raise MotleyError with the place of the error if a method of a user's task fails."""
    from motley.engines.out_of_memory import out_of_memory

    try:
        yield
    except Exception as error:
        if isinstance(error, MotleyError) or out_of_memory(error):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise MotleyError(
            f"{method}() of the task {type(task).__name__} raised {type(error).__name__}: {error} "
            f"({place.filename}, line {place.lineno}); correct the method, as docs/your_model.md "
            "shows"
        ) from error


def _predict_columns(task: "Task", net: "Net", batch: "Tensors") -> dict[str, list[Any]]:
    """Return the columns that ``predict`` of a user's task returns, as lists.

    Raises:
        MotleyError: ``predict`` fails, or a column does not have a value for each sample.
    """
    count = len(next(iter(batch.values())))
    with _naming_method(task, "predict"):
        made = task.predict(net, batch)
        result = {
            str(name): values.tolist() if hasattr(values, "tolist") else list(values)
            for name, values in made.items()
        }
        for name, values in result.items():
            if len(values) != count:
                raise MotleyError(
                    f"predict() of the task {type(task).__name__} returns "
                    f"{plural(len(values), 'value')} in the column {name!r} for "
                    f"{plural(count, 'sample')}; return one value per sample"
                )
    return result


def _make_predictor(
    trained: "Trained",
    task: "Task",
    precision: str,
    predict: "Callable[[Net, Tensors], Mapping[str, Sequence[Any]]]",
    places: Sequence[str] = (),
) -> "Predictor":
    """Return a predictor for the task's held-out samples, on a GPU if the host has one."""
    import torch

    from motley.infer.predictor import Predictor, select_precision

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Predictor(
        replace(trained, task=task), task.data(held_out=True), device,
        select_precision(precision, device), max(1, min(8, len(os.sched_getaffinity(0)) // 2)),
        predict, lambda text: print(f"motley: {text}", file=sys.stderr), places,
    )  # fmt: skip


def _split(count: int, batch: int) -> Iterator[range]:
    """Yield a range of sample indices for each batch, for ``count`` samples."""
    for start in range(0, count, batch):
        yield range(start, min(start + batch, count))


def flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of an image as the cells of a CSV line.

    The most probable class is in the columns ``class`` and ``probability``, the next one in
    ``class_2`` and ``probability_2``, and so on.
    """
    result: dict[str, Any] = {"file": record["file"]}
    for number, each in enumerate(record.get("classes", ()), 1):
        end = "" if number == 1 else f"_{number}"
        result |= {f"class{end}": each["class"], f"probability{end}": each["probability"]}
    if "labels" in record:
        result["labels"] = "|".join(record["labels"])
    if "value" in record:
        result["value"] = record["value"]
    return result


def _write_nested(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of a CSV line for a row of a table; lists and mappings become JSON."""
    return {
        name: json.dumps(finite(value), ensure_ascii=False, default=str)
        if isinstance(value, list | dict) else value
        for name, value in record.items()
    }  # fmt: skip


def write(
    records: Iterator[dict[str, Any]],
    file: TextIO,
    form: str,
    to_cells: Callable[[Mapping[str, Any]], dict[str, Any]] = flatten,
) -> int:
    """Write all records, each as soon as it is known, and return their number.

    Args:
        records: the records.
        file: the file.
        form: ``csv`` or ``jsonl``.
        to_cells: function that returns the cells of a CSV line for a record.
    """
    lines, count = None, 0
    for record in records:
        count += 1
        if form == JSON_LINES:
            file.write(json.dumps(finite(record), ensure_ascii=False, default=str) + "\n")
        else:
            cells = to_cells(record)
            if lines is None:
                lines = csv.DictWriter(file, cells, lineterminator="\n")
                lines.writeheader()
            lines.writerow(cells)
        file.flush()
    return count


def _check_paths(options: argparse.Namespace, tables: Sequence[Path]) -> None:
    """Raise MotleyError if tables and other options of the command line contradict each other.

    Args:
        options: the options.
        tables: the paths that are tables.
    """
    if tables and len(tables) < len(options.paths):
        other = next(path for path in options.paths if path not in tables)
        raise MotleyError(
            f"{tables[0]} is a table, and {other} is not; predict tables and images in two calls"
        )
    for flag, value in (("--top-k", options.top_k), ("--test-crops", options.test_crops)):
        if tables and value is not None:
            raise MotleyError(f"{flag} applies to images, and {tables[0]} is a table; leave it out")
    for path in options.paths:
        if options.out and options.out.exists() and path.exists() and options.out.samefile(path):
            raise MotleyError(f"--out {options.out} would replace {path}; name another file")


def _open_output(path: Path) -> TextIO:
    try:
        return path.open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise MotleyError(
            f"--out {path}: {error.strerror}; name a file in a folder that you can write"
        ) from None


def main(words: Sequence[str] | None = None) -> int:
    """Write predictions for the files on the command line, and return the exit code.

    The exit code is 1 if a file cannot be read.
    """
    escape_unprintable()
    parser = OneVoice(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or an exported one")
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH",
                        help="image files, folders of them, or tables")  # fmt: skip
    parser.add_argument("--top-k", type=positive, metavar="K",
                        help="classes per file, the most probable first; default 1")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="write to this file; default: the terminal")  # fmt: skip
    parser.add_argument("--format", choices=(CSV, JSON_LINES),
                        help="format; default: by the ending of --out, or csv")  # fmt: skip
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N",
                        help="images or rows that are computed together, default 64")  # fmt: skip
    parser.add_argument("--test-crops", type=crops, metavar="1|5|10",
                        help="crops per image, whose outputs are averaged; default: as in the run"
                        )  # fmt: skip
    parser.add_argument("--precision", choices=("auto", *PRECISIONS), default="auto")
    parser.add_argument("--data-dir", metavar="DIR",
                        help="folder of the run's data, if it has moved")  # fmt: skip
    parser.add_argument(
        "--use-ema",
        action="store_true",
        help=("for a run with --model-ema: use the averaged parameters"),
    )
    options = parser.parse_args(words)
    ending = options.out.suffix.lower().lstrip(".") if options.out else ""
    form = options.format or (JSON_LINES if ending in (JSON_LINES, "json", "ndjson") else CSV)
    from motley.data.images import list_images
    from motley.data.tables import TABLES, read_rows

    tables = [path for path in options.paths if path.suffix.lower() in TABLES]
    try:
        _check_paths(options, tables)
        rows = [each for path in tables for each in read_rows(path)]
        files = [] if tables else list_images(options.paths)
        trained = open_model(options.run, options.data_dir, options.use_ema)
        if tables:
            records = predict_rows(trained, rows, options.precision, options.batch_size)
        else:
            records = predict_images(
                trained, files, options.top_k or 1, options.precision, options.batch_size,
                options.test_crops,
            )  # fmt: skip
        due, unit = (len(rows), "row") if tables else (len(files), "image")
        with contextlib.ExitStack() as stack:
            file: TextIO = sys.stdout
            if options.out:
                file = stack.enter_context(_open_output(options.out))
            count = write(records, file, form, _write_nested if tables else flatten)
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MotleyError, OSError) as error:
        print(f"motley: {error}", file=sys.stderr)
        return 1
    if options.out:
        print(f"{options.out}: {count:,} of {plural(due, unit)}")
    return 0 if count == due else 1
