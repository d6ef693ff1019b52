"""What does Motley cost on one GPU? Its loop beside a bare PyTorch loop, in one run.

    python benchmarks/single_gpu.py --json benchmarks/results/single_gpu.json
    python benchmarks/single_gpu.py --quick --json /tmp/single_gpu.json

All train the same timm model with the same optimizer on synthetic images. The bare loop
keeps one batch on the GPU and records nothing; Motley loads, augments and copies every
image, measures, logs the GPU and writes a record a step. Repeats are interleaved; a rate
is the median over repeats, its spread (largest - smallest) / median. Without a GPU it
runs on the CPU with a small model, to try it.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import result
from result import ROOT

MODES = {
    "bare": "bare PyTorch loop",
    "motley-np1": "motley, mpirun -np 1",
    "motley-np5": "motley, mpirun -np 5",
    "motley-deepspeed": "motley, DeepSpeed stage 0, mpirun -np 1",
}


def bare_loop(model: str, batch: int, steps: int, skip: int, precision: str) -> float:
    """Images/s of the plainest loop that trains this model."""
    import timm
    import torch
    from timm.optim import create_optimizer_v2
    from torch.nn import functional

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = timm.create_model(model, num_classes=1000).to(device)
    optimizer = create_optimizer_v2(net, opt="adamw", lr=1e-3, weight_decay=0.05, fused=True)
    size = timm.get_pretrained_cfg(model).input_size[-1]
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)
    for step in range(steps):
        if step == skip:
            _wait(device)
            start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = functional.cross_entropy(net(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    _wait(device)
    return batch * (steps - skip) / (time.perf_counter() - start)


def _wait(device: object) -> None:
    import torch

    if str(device) == "cuda":
        torch.cuda.synchronize()


def motley(mode: str, options: argparse.Namespace, logs: Path) -> float:
    """Images/s of a run of ours, by the clock times of its records."""
    from motley.records.run_folder import RunFolder

    script = "deepspeed/train_vit.py" if mode == "motley-deepspeed" else "torch_dist/train_vit.py"
    name = f"{mode}-{time.monotonic_ns()}"
    command = [
        "mpirun", "-np", "5" if mode == "motley-np5" else "1", "--hostfile", "hosts.txt",
        "./entry_cn.sh", script, "--dataset", "synthetic", "--model", options.model,
        "--batch-size", str(options.batch), "--precision", options.precision,
        "--max-steps", str(options.steps), "--logs", str(logs), "--run", name,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    print(*(f"    {line}" for line in done.stdout.splitlines() if "left out" in line), sep="\n")
    steps = RunFolder(logs / name).read_steps()[0]
    first, last = steps[options.skip - 1], steps[-1]
    return options.batch * (last["step"] - first["step"]) / (last["time"] - first["time"])


def table(rates: dict[str, list[float]], options: argparse.Namespace) -> list[dict[str, object]]:
    """One row a mode; the bare loop is the limit."""
    limit = statistics.median(rates["bare"])
    rows = []
    for mode, values in rates.items():
        rate = statistics.median(values)
        rows.append(
            {
                "mode": mode, "engine": "deepspeed" if "deepspeed" in mode else "torch",
                "link": None, "n": options.batch, "images_per_s": rate,
                "fraction_of_limit": rate / limit, "times_plain_ddp": None,
                "times_best_single": rate / limit,
                "spread": (max(values) - min(values)) / rate, "repeats": values,
            }
        )  # fmt: skip
    return rows


def machine() -> dict[str, object]:
    """What it ran on."""
    from motley.cluster.facts import read_node

    node = read_node()
    return {
        "gpus": [device.name for device in node.devices], "driver": node.driver, "cpu": node.cpu,
        "cores": node.cores, "system": platform.platform(),
    }  # fmt: skip


def main() -> None:
    """Run all modes in turn, print a table and write JSON."""
    options = arguments()
    if options.bare:
        rate = bare_loop(
            options.model, options.batch, options.steps, options.skip, options.precision
        )
        print(rate)
        return

    started = time.time()
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    own = [sys.executable, __file__, "--bare", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as logs:
        for repeat in range(options.repeats):
            order = list(MODES) if repeat % 2 == 0 else list(MODES)[::-1]
            for mode in order:
                print(f"repeat {repeat + 1} of {options.repeats}: {MODES[mode]}", flush=True)
                if mode == "bare":
                    done = subprocess.run(own, check=True, capture_output=True, text=True)
                    rates[mode].append(float(done.stdout.split()[-1]))
                else:
                    rates[mode].append(motley(mode, options, Path(logs)))
                print(f"    {rates[mode][-1]:,.1f} images/s", flush=True)
    rows = table(rates, options)
    print(f"\n{options.model}, {options.precision}, {options.batch} images a step")
    for row in rows:
        print(
            f"  {MODES[str(row['mode'])]:<42} {row['images_per_s']:9,.1f} images/s  "
            f"{row['fraction_of_limit']:.3f} of the bare loop  spread {row['spread']:.1%}"
        )
    if options.json:
        result.write(
            options.json, rows, started, machine=machine(), model=options.model,
            precision=options.precision, steps=options.steps, skipped=options.skip,
        )  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line; what is not given depends on whether there is a GPU."""
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    model = "vit_base_patch16_224" if gpu else "vit_tiny_patch16_224"
    parser.add_argument("--model", default=model, help="timm name")
    parser.add_argument("--batch", type=int, default=256 if gpu else 8, help="images a step")
    parser.add_argument("--steps", type=int, default=80 if gpu else 8)
    parser.add_argument("--skip", type=int, default=20 if gpu else 3, help="steps not timed")
    parser.add_argument("--precision", default="bf16" if gpu else "fp32", choices=("bf16", "fp32"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.repeats = 1
    return options


if __name__ == "__main__":
    main()
