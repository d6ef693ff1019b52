"""Loops with a mistake in them, each of which the library names.

python tests/support/drivers/loop_refusals.py CASE

A case that begins with "fsdp: " has models in parts.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import timm
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

import motley


class Endless(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        yield from range(8)


class Stream(IterableDataset[int]):
    """Rows without an index."""

    def __iter__(self) -> Iterator[int]:
        yield from range(8)


class Skipping(nn.Sequential):
    """Blocks of which each pass leaves one out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)  # type: ignore[no-any-return]


def main(case: str) -> None:
    strategy, case = ("fsdp", case[6:]) if case.startswith("fsdp: ") else ("ddp", case)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if case == "a group of its own":
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2
        )
    lab = motley.join(
        allow=["drop_out"] if case == "allow" else (),
        wire="powersgd:2" if case == "powersgd" else "exact",
        strategy="fdsp" if case == "strategy" else strategy,
    )
    if case == "twice":
        motley.join()
    data: Any = TensorDataset(torch.randn(16 + (rank if case == "data" else 0), 4))
    model: nn.Module = nn.Sequential(nn.Linear(4, 4 + (rank if case == "model" else 0)))
    if case == "batch norm":
        model.append(nn.BatchNorm1d(4))
    match case:
        case "skipping":
            model = Skipping(nn.Linear(4, 4), nn.Linear(4, 4))
        case "scalar":
            model.register_parameter("scale", nn.Parameter(torch.ones(())))
        case "shared":
            model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
            model[1].weight = model[0][1].weight
        case "average":
            model = torch.optim.swa_utils.AveragedModel(model)
    if case == "DDP":
        model = DistributedDataParallel(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if case == "no model":
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    if case == "whole tensors":
        optimizer = timm.optim.create_optimizer_v2(model, opt="lamb")
    if case == "LBFGS":
        optimizer = torch.optim.LBFGS(model.parameters())
    lab.prepare(model, *([optimizer] if case not in ("no optimizer", "another optimizer") else []))
    if case == "scaler":
        lab.prepare(torch.amp.GradScaler("cpu"))
    if case == "another optimizer":
        lab.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    loader: Any = DataLoader(data, batch_size=4)
    match case:
        case "an iterator":
            loader = iter(loader)
        case "a stream":
            loader = DataLoader(Stream(), batch_size=4)
        case "no length":
            loader = DataLoader(data, batch_size=4, sampler=Endless())
        case "no batches":
            loader = DataLoader(data, batch_size=None)
        case "a huge order":
            huge = RandomSampler(data, replacement=True, num_samples=10**10)
            loader = DataLoader(data, batch_size=4, sampler=huge)
        case "uneven batches":
            train = lab.batches(lambda n: (torch.zeros(4 - n % 2, 4),), 5)
        case "no rows":
            lab.batches(lambda n: {"x": torch.zeros(4, 2), "y": torch.zeros(2)}, 5)
    train = train if case == "uneven batches" else lab.loader(loader)
    if case == "prepared loader":
        lab.prepare(loader)
    if case == "outside":
        lab.backward(model(torch.randn(2, 4)).sum())
    rest = iter(train)
    for (rows,) in rest:
        loss = model(rows).square().mean() / 2
        match case:
            case "rows":
                loss = model(rows).square().mean(1)
            case "NaN":
                loss = loss * (float("nan") if rank else 1.0)
            case "weight":
                lab.backward(loss, weight=-1.0)
            case "reduction":
                lab.backward(loss, reduction="max")
            case "rates":
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
            case "inside":
                next(iter(train))
            case "a parameter":
                optimizer.add_param_group({"params": list(nn.Linear(4, 4).parameters())})
            case "ahead":
                next(rest)
            case "several ahead":
                ahead = [rows, *next(rest)]
                first, loss = (model(each).square().mean() for each in ahead)
                lab.backward(first)
            case "changed rows":
                lab.step(lambda part: model(part).square().mean(), rows / 2)
            case "exit":
                if rank == 1 and lab.batch == 2:
                    sys.exit(0)
        (loss.backward if case == "bare backward" else partial(lab.backward, loss))()
        if case == "bare backward too" and lab.batch:
            model(rows).mean().backward()
        if case == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if case == "steps apart" and rank == 0 and lab.batch == 0:
            continue
        optimizer.step(loss.item if case == "LBFGS" else None)


if __name__ == "__main__":
    main(sys.argv[1])
