"""What does Motley cost on one GPU? Its loop beside a bare PyTorch loop, in one run.

    python benchmarks/single_gpu.py --json benchmarks/results/single_gpu.json
    python benchmarks/single_gpu.py --task text --json benchmarks/results/single_gpu_text.json
    python benchmarks/single_gpu.py --quick --json /tmp/single_gpu.json
    python benchmarks/single_gpu.py --busy-core --modes bare-compiled,motley-compiled

All train the same model with the same optimizer: a timm model on synthetic images, or a GPT of
GPT-2's size on text, compiled. The bare loop keeps one batch on the GPU and records nothing; nor
do those through Accelerate and Lightning Fabric. Motley loads, augments and copies every sample,
measures, logs the GPU and writes a record a step; so short a run it compiles only when it is told
to. With ``--busy-core`` all run on one core that a busy loop shares, after a run of each on all
cores, which fills the caches of compiled code.

Repeats are interleaved, each timed by the clock after its first steps. A rate is their median,
beside the mean; its spread is (largest - smallest) / median. Without a GPU it tries a small model.
"""

import argparse
import contextlib
import importlib.util
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import result
from bare_loops import GPTS, PACKAGES, PEERS, bare_loop
from result import ROOT

from motley.launch.process import die_with_parent
from motley.live.track import PARTS
from motley.records.costs import mean_rate
from motley.records.run_folder import RunFolder

MANUAL = "manual"  # 99 times 0.4 MB: no epoch ends

MODES = {
    "bare": "bare PyTorch loop",
    "bare-compiled": "bare PyTorch loop, torch.compile(model)",
    "accelerate": "the bare loop through Accelerate",
    "accelerate-compiled": "the bare loop through Accelerate, torch.compile(model)",
    "fabric": "the bare loop through Lightning Fabric",
    "fabric-compiled": "the bare loop through Lightning Fabric, torch.compile(model)",
    "motley-np1": "motley, mpirun -np 1",
    "motley-compiled": "motley, --compile, mpirun -np 1",
    "motley-np5": "motley, mpirun -np 5",
    "motley-deepspeed": "motley, DeepSpeed stage 0, mpirun -np 1",
    "motley-all": "motley, --compile, a rank on each GPU, each with as many samples",
}


def motley(mode: str, options: argparse.Namespace, logs: Path) -> tuple[float, dict[str, Any]]:
    """Samples/s of a run of ours, and where its time went.

    The rate is by the clock times of the records; of ``motley-all``, whose epochs end within the
    timed steps, by the times of its full steps.
    """
    import torch

    script = "deepspeed/train.py" if mode == "motley-deepspeed" else "torch_dist/train.py"
    name, on_all = f"{mode}-{time.monotonic_ns()}", mode == "motley-all"
    ranks = max(1, torch.cuda.device_count()) if on_all else 5 if mode == "motley-np5" else 1
    batch = options.batch * (ranks if on_all else 1)
    steps = options.all_steps if on_all else options.steps
    command = [
        "mpirun", "-np", str(ranks), "--hostfile", "hosts.txt",
        "./entry_cn.sh", script, *words_of(options), "--batch-size", str(batch),
        "--precision", options.precision, "--max-steps", str(steps), "--logs", str(logs),
        "--run", name, *(["--compile"] if mode in ("motley-compiled", "motley-all") else []),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    for line in done.stdout.splitlines():
        if "left out" in line:
            print(f"    {line}")
    run = RunFolder(logs / name)
    records = run.read_steps()[0]
    timed = [step for step in records[options.skip :] if step["n_global"] == batch]
    parts = {**parts_of(timed), "replans": sum(e["event"] == "replan" for e in run.read_events())}
    if on_all:
        return batch / statistics.fmean(batch / step["samples_per_s"] for step in timed), parts
    return mean_rate(records[options.skip - 1 :]) or 0.0, parts


def parts_of(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of a step's parts, the median, and of the longest steps, by their numbers: one that
    stands still for 0.1 s costs 1 % of so few."""
    parts = {part: [step[part] or 0.0 for step in steps] for part in PARTS}
    whole = [sum(each) for each in zip(*parts.values(), strict=True)]
    longest = sorted(zip(whole, (step["step"] for step in steps), strict=True), reverse=True)[:5]
    return {
        **{part: statistics.median(values) for part, values in parts.items()},
        "step": statistics.median(whole), "longest": {step: seconds for seconds, step in longest},
    }  # fmt: skip


def words_of(options: argparse.Namespace) -> list[str]:
    """The model and its data."""
    if options.task == "image":
        return ["--dataset", "synthetic", "--model", options.model]
    names = ("--vocabulary", "--length", "--depth", "--width", "--heads")
    sizes = zip(names, map(str, GPTS[options.model]), strict=True)
    return ["--task", "text", "--compile", "--eval-samples", "8", "--save-every", "100000",
            "--text", *[MANUAL] * 99, *itertools.chain(*sizes)]  # fmt: skip


def table(
    rates: dict[str, list[float]],
    parts: dict[str, list[dict[str, Any]]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One row a mode; the first mode is the limit."""
    limit = statistics.median(rates[options.modes[0]])
    rows = []
    for mode, values in rates.items():
        rate = statistics.median(values)
        rows.append(
            {
                "mode": mode, "engine": "deepspeed" if "deepspeed" in mode else "torch",
                "link": None, "n": options.batch, "images_per_s": rate,
                "mean_images_per_s": statistics.fmean(values),
                "fraction_of_limit": rate / limit, "times_plain_ddp": None,
                "times_best_single": rate / limit,
                "spread": (max(values) - min(values)) / rate, "repeats": values,
                "seconds": parts.get(mode),
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


def log_cost(samples: int = 50) -> dict[str, float]:
    """Seconds of the GPU log's first sample, of the others, and what part of a run's time it is."""
    from motley.cluster.gpus import GPUTIL_EVERY_S, GpuSampler
    from motley.config.options import Config

    times = [time.perf_counter()]
    with GpuSampler() as sampler:
        for _ in range(samples):
            sampler.sample()
            times.append(time.perf_counter())
    first, usual = times[1] - times[0], (times[-1] - times[1]) / (samples - 1)
    part = usual / Config().gpu_log_interval + first / GPUTIL_EVERY_S
    return {"first_s": first, "sample_s": usual, "part": part}


def main() -> None:
    """Run all modes in turn, print a table and write JSON."""
    options = arguments()
    if options.bare:
        print(bare_loop(options))
        return

    started = time.time()
    rates: dict[str, list[float]] = {mode: [] for mode in options.modes}
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for mode in options.modes:
        package = PACKAGES.get(mode.partition("-")[0])
        if package and importlib.util.find_spec(package) is None:
            raise SystemExit(f"{mode} needs: pip install {package}")
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        if options.busy_core:
            for mode in options.modes:
                print(f"on all cores: {MODES[mode]}", flush=True)
                print(f"    {measure(mode, options, Path(logs))[0]:,.1f} samples/s", flush=True)
            stack.enter_context(busy_core())
        for repeat in range(options.repeats):
            order = options.modes if repeat % 2 == 0 else options.modes[::-1]
            for mode in order:
                print(f"repeat {repeat + 1} of {options.repeats}: {MODES[mode]}", flush=True)
                rate, own_parts = measure(mode, options, Path(logs))
                rates[mode].append(rate)
                if own_parts:
                    parts[mode].append(own_parts)
                print(f"    {rate:,.1f} samples/s", *seconds_in_words(parts[mode]), flush=True)
    rows, log = table(rates, parts, options), log_cost()
    show(rows, log, options)
    if options.json:
        result.write(
            options.json, rows, started, machine=machine(), gpu_log=log, model=options.model,
            precision=options.precision, steps=options.steps, skipped=options.skip,
            busy_core=options.busy_core,
        )  # fmt: skip


def measure(mode: str, options: argparse.Namespace, logs: Path) -> tuple[float, dict[str, Any]]:
    """Samples/s of one run of a mode; and where its time went, where that is known."""
    if mode.partition("-")[0] not in PEERS:
        return motley(mode, options, logs)
    own = [sys.executable, __file__, *sys.argv[1:], "--bare", mode]
    done = subprocess.run(own, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1]), {}


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Bind this process, and what it starts, to one core on which another one computes."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=die_with_parent)
    try:
        yield
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, before)


def seconds_in_words(parts: list[dict[str, Any]]) -> list[str]:
    """Of the last repeat; of a bare loop nothing is known."""
    if not parts:
        return []
    last = parts[-1]
    each = ", ".join(f"{part[2:]} {1e3 * last[part]:.2f}" for part in PARTS)
    longest = ", ".join(
        f"{1e3 * seconds:.1f} (step {step})" for step, seconds in last["longest"].items()
    )
    return [f"(ms of a step: {each}; median {1e3 * last['step']:.2f}, longest {longest})"]


def show(rows: list[dict[str, Any]], log: dict[str, float], options: argparse.Namespace) -> None:
    """The table, and below it what the GPU log costs."""
    each = 1 if options.task == "image" else GPTS[options.model][1]
    unit = "images" if options.task == "image" else "tokens"
    print(f"\n{options.model}, {options.precision}, {options.batch} samples a step")
    for row in rows:
        print(
            f"  {MODES[str(row['mode'])]:<42} {each * row['images_per_s']:11,.1f} {unit}/s  "
            f"{row['fraction_of_limit']:.3f} of the first  spread {row['spread']:.1%}"
        )
    print(
        f"a sample of the GPU log takes {1000 * log['sample_s']:.2f} ms, the first one "
        f"{1000 * log['first_s']:.0f} ms: {log['part']:.3%} of the time"
    )


def arguments() -> argparse.Namespace:
    """The command line; what is not given depends on whether there is a GPU."""
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--task", choices=("image", "text"), default="image")
    parser.add_argument("--model", help=f"timm name, or of {', '.join(GPTS)}")
    parser.add_argument("--batch", type=int, help="samples a step")
    parser.add_argument("--steps", type=int, default=180 if gpu else 8,
                        help="fewer than an epoch has, which ends in an evaluation")  # fmt: skip
    parser.add_argument("--skip", type=int, default=20 if gpu else 3, help="steps not timed")
    parser.add_argument("--precision", default="bf16" if gpu else "fp32", choices=("bf16", "fp32"))
    parser.add_argument("--repeats", type=int, default=3)
    usual = [mode for mode in MODES if mode != "motley-all"]
    parser.add_argument("--modes", type=lambda words: words.split(","), default=usual,
                        help=f"of {', '.join(MODES)}; the first is the limit")  # fmt: skip
    parser.add_argument("--all-steps", type=int, default=520 if gpu else 12,
                        help="steps of motley-all")  # fmt: skip
    parser.add_argument("--busy-core", action="store_true",
                        help="bind all to one core that a busy loop shares")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {"image": ("vit_base_patch16_224", 256), "text": ("gpt2", 32)}
    small = {"image": ("vit_tiny_patch16_224", 8), "text": ("gpt-tiny", 8)}
    model, batch = (sizes if gpu else small)[options.task]
    options.model, options.batch = options.model or model, options.batch or batch
    if options.quick:
        options.repeats = 1
    return options


if __name__ == "__main__":
    main()
