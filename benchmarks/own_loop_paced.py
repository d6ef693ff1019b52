"""A loop of one's own on paced hosts, with the library; own_loop_lab.py starts it.

    ... ./entry_cn.sh benchmarks/own_loop_paced.py --rates 70,50,30,20,10 --losses OUT.json

--rates are samples a second, by rank; without them the host is not paced. The model is that of
paced_train.py. Samples count by weights of their own, as sequences do by their tokens, and the last
batch is smaller.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from paced import Pace, Paced
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import motley
from motley.tasks.builtin import get_task
from motley.tasks.net import build_net
from motley.train.command_line import read_config, training_parser


class Samples(Dataset[Any]):
    """Images of noise, with a label and a weight each."""

    def __init__(self, images: Tensor, rows: int) -> None:
        self._images, self._rows = images, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> tuple[Tensor, int, float]:
        image = self._images[index % len(self._images)]
        return image + index % 10 / 10, index % 10, 1.0 + index % 5


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", type=lambda text: [float(word) for word in text.split(",")])
    parser.add_argument("--n", type=int, default=180)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--run")
    parser.add_argument("--logs", default="logs")
    parser.add_argument("--losses", type=Path, help="write the losses of all steps here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    words = ["--batch-size", str(options.n), "--no-augment", "--precision", "fp32"]
    config = read_config(training_parser(""), words)
    task = get_task(config)
    lab = motley.join(logs=options.logs, run=options.run, precision="fp32")
    rates = options.rates or [math.inf] * lab.size
    model = Paced(task, build_net(task, config), Pace(1 / rates[lab.rank]))
    # AdamW turns a change of 1e-7 in the first parameters into one of 1e-3 in the 45th loss, so
    # that rounding would hide other differences.
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.02, momentum=0.9)
    lab.prepare(model.net, optimizer)
    rows = options.n * options.steps - options.n // 3
    samples = Samples(model.noise(64)["images"].cpu(), rows)
    loader = lab.loader(DataLoader(samples, batch_size=options.n))
    lab.resume()
    losses = []
    for images, labels, weights in loader:
        each = model({"images": images, "labels": labels})
        weight = weights.sum().item()
        loss = (each * weights).sum() / weight if weight else each.sum()
        lab.backward(loss, weight=weight)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(lab.loss)
    if options.losses and lab.is_main:
        options.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
