"""What do groups cost? A ResNet with batch norm over fixed groups, beside torch's own.

    .venv/bin/python benchmarks/batch_norm.py --json benchmarks/results/batch_norm.json
    .venv/bin/python benchmarks/batch_norm.py --quick --json /tmp/batch_norm.json

Forward and backward pass of one micro-batch, as in training; repeats are interleaved, a rate is the
median, its spread (largest - smallest) / median. On a GPU it is ResNet-50 at 224 pixels in bf16,
elsewhere ResNet-18 at 64.
"""

import argparse
import statistics
import time
from pathlib import Path

import result


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

    from motley.data.batch import Tensors
    from motley.measure.device import wait_for
    from motley.tasks.builtin.image import ImageTask
    from motley.tasks.model import TaskModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    name, size, n = ("resnet50", 224, 256) if on_gpu else ("resnet18", 64, 64)
    precision, passes = ("bf16", 20) if on_gpu else ("fp32", 2)

    def model_of(group: int | None) -> TaskModel:
        task = ImageTask(name=name, dataset="synthetic", img_size=size, bn_group=group or 32)
        made = TaskModel(task, task.model(), precision, device)
        for part in made.net.modules() if group is None else ():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                del part.forward  # its class's own again
        return made

    modes = {"torch's batch norm": None, "motley --bn-group 32": 32, "motley --bn-group 16": 16,
             "motley --bn-group 8": 8}  # fmt: skip
    models = {mode: model_of(group) for mode, group in modes.items()}

    def rate(model: TaskModel, data: Tensors) -> float:
        model(data).sum().backward()
        wait_for(device)
        start = time.perf_counter()
        for _ in range(passes):
            model(data).sum().backward()
            model.zero_grad(set_to_none=True)
        wait_for(device)
        return n * passes / (time.perf_counter() - start)

    data = next(iter(models.values())).noise(n)
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(1 if options.quick else 7):
        for mode, model in models.items():
            found[mode].append(rate(model, data))
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
    device_name = torch.cuda.get_device_name() if on_gpu else "CPU"
    result.write(options.json, rows, started, model=name, precision=precision, device=device_name)


if __name__ == "__main__":
    main()
