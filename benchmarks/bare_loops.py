"""The loops that single_gpu.py compares Motley's with: PyTorch's own, and those of two peers."""

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

# Of a GPT: vocabulary, length, depth, width, heads. nanoGPT trains GPT-2 small with this one.
GPTS = {"gpt2": (50304, 1024, 12, 768, 12), "gpt-tiny": (256, 64, 2, 64, 2)}


def bare_loop(options: argparse.Namespace) -> float:
    """Samples/s of the plainest loop that trains this model, or of a peer's, which computes on the
    same batch: what loads and records costs the peer nothing either."""
    import torch
    from timm.optim import create_optimizer_v2

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net, loss_of = (text if options.task == "text" else images)(options, device)
    peer, _, compiled = options.bare.partition("-")
    if compiled:
        if peer in PACKAGES:  # Fabric has to see how a model is compiled
            importlib.import_module(PACKAGES[peer])
        net = torch.compile(net)
    optimizer = create_optimizer_v2(net, opt="adamw", lr=1e-3, weight_decay=0.05, fused=True)
    net, optimizer, backward = PEERS[peer](net, optimizer, options.precision)
    autocast = peer == "bare" and options.precision == "bf16"
    for step in range(options.steps):
        if step == options.skip:
            _wait(device)
            start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = loss_of(net)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    _wait(device)
    return options.batch * (options.steps - options.skip) / (time.perf_counter() - start)


Loop = tuple[Any, Any, Callable[[Any], Any]]  # model, optimizer, and what goes backward


def plain(net: Any, optimizer: Any, precision: str) -> Loop:
    """As they are."""
    return net, optimizer, lambda loss: loss.backward()


def accelerate(net: Any, optimizer: Any, precision: str) -> Loop:
    """As Accelerate's quicktour has it."""
    from accelerate import Accelerator

    made = Accelerator(mixed_precision="bf16" if precision == "bf16" else "no")
    net, optimizer = made.prepare(net, optimizer)
    return net, optimizer, made.backward


def fabric(net: Any, optimizer: Any, precision: str) -> Loop:
    """As Fabric's documentation has it."""
    from lightning_fabric import Fabric

    made = Fabric(precision="bf16-mixed" if precision == "bf16" else "32-true", devices=1)
    net, optimizer = made.setup(net, optimizer)
    return net, optimizer, made.backward


PEERS = {"bare": plain, "accelerate": accelerate, "fabric": fabric}
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}


def images(options: argparse.Namespace, device: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A model, and what computes its loss on a batch."""
    import timm
    import torch
    from torch.nn import functional

    net = timm.create_model(options.model, num_classes=1000).to(device)
    size = timm.get_pretrained_cfg(options.model).input_size[-1]
    pixels = torch.randn(options.batch, 3, size, size, device=device)
    labels = torch.randint(0, 1000, (options.batch,), device=device)
    return net, lambda net: functional.cross_entropy(net(pixels), labels, label_smoothing=0.1)


def text(options: argparse.Namespace, device: Any) -> tuple[Any, Callable[[Any], Any]]:
    """See :func:`images`; compiled, with its loss."""
    import torch
    from torch.nn import functional

    from motley.tasks.gpt import Gpt, Shape

    net = Gpt(Shape(*GPTS[options.model], dropout=0.0)).to(device)
    tokens = torch.randint(0, 256, (options.batch, GPTS[options.model][1] + 1), device=device)
    given, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    return net, torch.compile(
        lambda net: functional.cross_entropy(net(given).flatten(0, 1), targets)
    )


def _wait(device: object) -> None:
    import torch

    if str(device) == "cuda":
        torch.cuda.synchronize()
