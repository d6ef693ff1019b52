"""What do groups cost? A ResNet with batch norm over fixed groups, beside torch's own.

    .venv/bin/python benchmarks/batch_norm.py --json benchmarks/results/batch_norm.json
    .venv/bin/python benchmarks/batch_norm.py --quick --json /tmp/batch_norm.json

Forward and backward pass of one micro-batch, as in training; repeats are interleaved, a rate is the
median, its spread (largest - smallest) / median. On a GPU it is ResNet-50 at 224 pixels in bf16,
compiled too, beside torch's that is compiled as a whole; elsewhere ResNet-18 at 64.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import result

if TYPE_CHECKING:
    import torch

    from motley.data.source import Tensors
    from motley.tasks.model import TaskModel


MODES = {
    "torch's batch norm": None, "motley --bn-group 32": 32, "motley --bn-group 16": 16,
    "motley --bn-group 8": 8,
}  # fmt: skip
COMPILED = {"torch's batch norm, torch.compile": None, "motley --bn-group 32, --compile": 32}


@dataclass(frozen=True)
class Size:
    """What is timed. n: samples of a micro-batch. passes: of one repeat."""

    model: str
    pixels: int
    n: int
    precision: str
    passes: int


ON_GPU, ON_CPU = Size("resnet50", 224, 256, "bf16", 20), Size("resnet18", 64, 64, "fp32", 2)


def main() -> None:
    """Time all, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one repeat")
    options = parser.parse_args()
    started = time.time()

    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = ON_GPU if device.type == "cuda" else ON_CPU
    results = time_all(size, device, repeats=1 if options.quick else 7)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    result.write(
        options.json, rows_of(results, size.n), started, model=size.model,
        precision=size.precision, device=name,
    )  # fmt: skip


def time_all(size: Size, device: "torch.device", repeats: int) -> dict[str, list[float]]:
    """Images a second of each mode, repeats interleaved."""
    import torch

    models = {mode: model_of(size, group, device) for mode, group in MODES.items()}
    computes: dict[str, torch.nn.Module] = dict(models)
    for mode, group in COMPILED.items() if device.type == "cuda" else ():
        models[mode] = model = model_of(size, group, device)
        computes[mode] = torch.compile(model) if group is None else model
        if group is not None:
            model.compile_task()
    # Each has its own: what one compiled for is noted on the tensors.
    given = {mode: models[mode].noise(size.n) for mode in models}
    results: dict[str, list[float]] = {mode: [] for mode in computes}
    for _ in range(repeats):
        for mode, compute in computes.items():
            results[mode].append(rate(compute, given[mode], size, device))
    return results


def model_of(size: Size, group: int | None, device: "torch.device") -> "TaskModel":
    """With batch norm over groups; None: torch's own."""
    from torch.nn.modules.batchnorm import _BatchNorm

    from motley.tasks.builtin.image import ImageTask
    from motley.tasks.model import TaskModel

    task = ImageTask(
        name=size.model, dataset="synthetic", img_size=size.pixels, bn_group=group or 32
    )
    made = TaskModel(task, task.model(), size.precision, device)
    if group is None:
        made.statistics = None
        for part in made.net.modules():
            if isinstance(part, _BatchNorm):
                part.__class__ = type(part).__bases__[1]  # its own again
    return made


def rate(compute: "torch.nn.Module", data: "Tensors", size: Size, device: "torch.device") -> float:
    """Images a second of some passes, after one that warms up."""
    from motley.measure.device import wait_for

    compute(data).sum().backward()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(size.passes):
        compute(data).sum().backward()
        compute.zero_grad(set_to_none=True)
    wait_for(device)
    return size.n * size.passes / (time.perf_counter() - start)


def rows_of(found: dict[str, list[float]], n: int) -> list[dict[str, Any]]:
    """A row for each mode, which is printed too."""
    plain = statistics.median(found["torch's batch norm"])
    rows = []
    for mode, rates in found.items():
        middle = statistics.median(rates)
        rows.append({
            "mode": mode, "engine": "torch", "link": None, "n": n, "images_per_s": middle,
            "fraction_of_limit": middle / plain, "times_plain_ddp": None,
            "times_best_single": middle / plain, "repeats": rates,
            "spread": (max(rates) - min(rates)) / middle,
        })  # fmt: skip
        print(f"{mode:24} {middle:8.1f} images/s, {middle / plain:.3f} of torch's", flush=True)
    return rows


if __name__ == "__main__":
    main()
