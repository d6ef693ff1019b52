"""The export of a trained model to a folder for other libraries, and to ONNX."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from motley.data.source import first_batch
from motley.errors import MotleyError
from motley.infer.predictor import Trained
from motley.registry import check_extras
from motley.tasks.builtin.image import ImageTask
from motley.tasks.task import Task

_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_EXAMPLES = 3  # samples, since torch takes a dimension of size 1 as constant
_CLOSE = 1e-4  # difference from onnxruntime that is allowed, relative to the largest output


def export(trained: Trained, folder: Path, onnx: bool) -> list[str]:
    """Write a model into a new folder.

    Args:
        trained: the model.
        folder: a new or empty folder.
        onnx: True: also write model.onnx.

    Returns:
        Lines of text that describe the written files.

    Raises:
        MotleyError: the folder is not empty, a package that ONNX needs is missing, or onnxruntime
            computes an output that differs from torch's.
    """
    if onnx:
        check_extras(_NEEDED, "--onnx")
    if folder.exists() and any(folder.iterdir()):
        raise MotleyError(f"{folder} is not empty; choose another folder with --to DIR")
    folder.mkdir(parents=True, exist_ok=True)
    net = trained.build()
    given = make_inputs(trained.task, net) if onnx else ()
    trained.task.save(net, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        follow_umask(path)  # safetensors writes files that only their owner may read
    lines = [f"{path.relative_to(folder)}: {path.stat().st_size / 2**20:.1f} MiB"
            for path in files]  # fmt: skip
    if onnx:
        lines.append(_write_onnx(net, given, folder / "model.onnx"))
    about = {
        "checkpoint": str(trained.folder), "task": trained.task.title(),
        "class_names": list(trained.task.class_names), "samples": trained.sample_list,
    }  # fmt: skip
    if isinstance(trained.task, ImageTask):
        about["target"] = trained.task.images.kind
    (folder / "motley.json").write_text(json.dumps(about, indent=1) + "\n")
    return lines


def follow_umask(path: Path) -> None:
    """Set the permissions of a file to those that open() gives a new file."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def make_inputs(task: Task, net: nn.Module) -> tuple[Any, ...]:
    """Return the inputs that a task passes to its network for some samples.

    The function lets the task compute scores with a replacement of the network, which records the
    inputs.

    Raises:
        MotleyError: the task passes inputs as keyword arguments.
    """
    inputs: list[tuple[Any, ...]] = []

    def recorder(*given: Any, **named: Any) -> Any:
        if named:
            raise MotleyError(
                f"{type(task).__name__} passes {', '.join(named)} to its network by name, and "
                "ONNX has inputs by position alone; pass them by position"
            )
        inputs.append(given)
        return net(*given)

    with torch.no_grad():
        task.scores(recorder, first_batch(task, _EXAMPLES)[0].data)
    return inputs[0]


def _write_onnx(net: nn.Module, given: tuple[Any, ...], path: Path) -> str:
    """Write the model for any number of samples, and compare onnxruntime's output with torch's.

    Returns:
        A line of text that describes the file.
    """
    import onnxruntime  # type: ignore[import-untyped]

    samples = torch.export.Dim("samples")
    shapes = tuple({0: samples} if isinstance(each, Tensor) else None for each in given)
    with _quiet():
        torch.onnx.export(net, given, path, dynamo=True, dynamic_shapes=shapes, verbose=False,
                          external_data=False)  # fmt: skip
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    worst = 0.0
    for count in (1, _EXAMPLES):
        some = [each[:count] for each in given]
        slots = zip(session.get_inputs(), some, strict=True)
        feed = {slot.name: each.numpy() for slot, each in slots}
        with torch.no_grad():
            expected = [each for each in tree_leaves(net(*some)) if isinstance(each, Tensor)]
        for result, right in zip(session.run(None, feed), expected, strict=True):
            largest = float(right.abs().max()) or 1.0
            worst = max(worst, float((torch.from_numpy(result) - right).abs().max()) / largest)
    if worst > _CLOSE:
        raise MotleyError(
            f"the results of {path} in onnxruntime differ from the model's by {worst:.2g} of its "
            "largest output; export without --onnx"
        )
    size = path.stat().st_size / 2**20
    return f"{path.name}: {size:.1f} MiB; onnxruntime's output differs by {worst:.1g} at most"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings and logs of torch's exporter in a ``with`` block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
