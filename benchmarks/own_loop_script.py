"""A training loop of one's own: bare, with the library, or with torch's DDP or FSDP2 by hand.

    python benchmarks/own_loop_script.py bare --steps 120

It prints its median seconds per step as its last line. The library's lines are those with ``lab``.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import time
from typing import Any

import timm
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import motley


class Noise(Dataset[Any]):
    """Images of noise, whose reading costs nothing."""

    def __init__(self, rows: int, size: int) -> None:
        self.rows, self.image = rows, torch.randn(3, size, size)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index % 10


class OneBatch:
    """The batch of a loader, as often as it has batches: the loop alone is timed."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Any:
        for images, labels in self.loader:
            yield images.to(self.device, non_blocking=True), labels.to(self.device)


def main() -> None:
    """Train a ViT in one of the ways."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("bare", "lab", "lab-fsdp", "ddp", "fsdp"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    strategy = "fsdp" if "fsdp" in options.way else "ddp"
    is_lab = options.way.startswith("lab")
    lab = motley.join(strategy=strategy, logs="/tmp/own_loop_logs") if is_lab else None
    batch, device = options.batch, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.way in ("ddp", "fsdp"):
        torch.distributed.init_process_group()
        batch //= torch.distributed.get_world_size()
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
    if lab:
        device = lab.device
    torch.manual_seed(0)
    model: Any = timm.create_model(options.model, num_classes=10, img_size=options.size)
    model.to(device)
    if options.way == "fsdp":
        for block in (*model.blocks, model):
            fully_shard(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    if lab:
        lab.prepare(model, optimizer)
    if options.way == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if options.compile:
        model = torch.compile(model)
    steps = options.warm_up + options.steps
    loader: Any = DataLoader(
        Noise(batch * steps, options.size), batch_size=batch, num_workers=options.workers,
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    if lab:
        loader = lab.loader(loader)
    low = torch.autocast(device.type, dtype=torch.bfloat16)
    ends = []
    for images, labels in OneBatch(loader, device):
        with low if device.type == "cuda" else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(images), labels)
        if lab:
            lab.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    ends = ends[options.warm_up :]
    took = [end - begin for begin, end in itertools.pairwise(ends)]
    is_first = lab.is_main if lab else os.environ.get("RANK", "0") == "0"
    if is_first:
        print(f"seconds {statistics.median(took):.6f}", flush=True)


if __name__ == "__main__":
    main()
