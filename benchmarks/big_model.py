"""A GPT that no GPU can hold: how fast, in how much memory, and how long its checkpoints take.

    mpirun -np 4 ./entry_cn.sh benchmarks/big_model.py --strategy fsdp --json big.json
    mpirun -np 2 ./entry_cn.sh benchmarks/big_model.py --strategy fsdp --json big2.json \\
        --resume logs/big/checkpoints/step_00000010 --against logs/big --run big2
    mpirun -np 2 ./entry_cn.sh benchmarks/big_model.py --strategy fsdp --opt adamw8bit --json 8.json
    mpirun -np 4 ./entry_cn.sh benchmarks/big_model.py --stage 3 --json zero.json
    mpirun -np 2 ./entry_cn.sh benchmarks/big_model.py --strategy fsdp --quick

Trains 13 billion parameters (40 blocks of 5,120, windows of 2,048 bytes, GPT-2's number of tokens),
saves half-way, and says of the steps after the third tokens/s and the part of the GPUs' peak that
is used (MFU: 6 P + 12 blocks * width * window operations a token, as PaLM counts, nothing for what
is computed again); the most memory of a rank beside what was foreseen; seconds to start, of a
save, how long training stops for it, and to load. --against: losses are compared with those of the
same steps of another run. All other options are those of the training scripts; --stage takes
DeepSpeed. --quick: a GPT of 0.3 million parameters, which processors train too.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import result  # first: where the library is
from real_run import lines_of

from motley.engines.strategies import TORCH, ZERO, chosen_strategy, known_strategies, list_engines
from motley.errors import MotleyError
from motley.launch.world import World, run
from motley.records.run_folder import RunFolder
from motley.train.command_line import read_config, training_parser
from motley.train.start import train

LARGE = """--task text --depth 40 --width 5120 --heads 40 --length 2048 --vocabulary 50304
    --batch-size 32 --max-steps 20 --save-every 10 --eval-samples 4 --lr 1e-4
    --warmup-epochs 0 --clip-grad 1 --workers 0 --keep 3 --run big --reshard-after-forward"""
SMALL = """--task text --depth 4 --width 64 --heads 4 --length 64 --vocabulary 512 --build blocks
    --batch-size 16 --max-steps 8 --save-every 4 --eval-samples 4 --lr 1e-3
    --warmup-epochs 0 --clip-grad 1 --workers 0 --keep 3 --run big --reshard-after-forward"""
TEXT = ["--text", *["manual"] * 10]  # windows enough for more than an epoch's steps
PEAK = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}  # of dense products in bf16, SXM
WARM = 3  # steps that are not timed


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the records of a run say."""
    content = RunFolder(folder).read_run()
    config, steps = content["config"], lines_of(folder / "steps.rank0.jsonl")
    ranks, device = len(content["ranks"]), content["ranks"][0]["device"]
    usual = [step for step in steps[WARM:] if step["n_global"] == config["batch_size"]]
    saves = {step["step"] + 1 for step in steps if not (step["step"] + 1) % config["save_every"]}
    # The step after a save waits for it.
    plain = [step for step in usual if step["step"] not in saves] or usual
    step_s = statistics.median(step["n_global"] / step["samples_per_s"] for step in plain)
    tokens_per_s = config["batch_size"] * config["length"] / step_s
    numbers = content["model"]["trained"]  # each once, also those that have two names
    each = 6 * numbers + 12 * config["depth"] * config["width"] * config["length"]
    peak = next((flops for name, flops in PEAK.items() if name in device), None)
    foreseen, held = content["memory"] or [], content["result"].get("memory_peak_mib", [])
    on_gpu = device.startswith("cuda")  # a processor's is of the whole process
    pairs = [(f["foreseen_mib"], mib) for f, mib in zip(foreseen, held, strict=False) if on_gpu]
    resumed = [e for e in lines_of(folder / "events.jsonl") if e["event"] == "resume"]
    return {
        "mode": f"motley-{'zero3' if options.zero else 'fsdp'}", "link": "direct",
        "engine": "deepspeed" if options.zero else "torch", "n": config["batch_size"],
        "ranks": ranks, "device": device, "parameters": numbers, "step_s": step_s,
        "images_per_s": None, "tokens_per_s": tokens_per_s,
        "fraction_of_limit": None, "times_plain_ddp": None, "times_best_single": None,
        "mfu": peak and tokens_per_s * each / (ranks * peak),
        "mfu_without_attention": peak and tokens_per_s * 6 * numbers / (ranks * peak),
        "spread": _spread([step["n_global"] / step["samples_per_s"] for step in plain]),
        "micro_batches": content["plan"]["micro_batches"],
        "memory_foreseen_mib": [foreseen for foreseen, _ in pairs], "memory_peak_mib": held,
        "memory_error": max((abs(f / mib - 1) for f, mib in pairs), default=None),
        "start": content["start"], "start_s": sum(content["start"].values()),
        "predicted_step_s": (content["plan"]["forecast"] or {}).get("step_s"),
        "load_s": resumed[0]["seconds"] if resumed else None, **_saves(folder, steps, step_s),
        "losses": {step["step"]: step["loss"] for step in steps},
    }  # fmt: skip


def _spread(seconds: list[float]) -> float:
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def _saves(folder: Path, steps: list[dict[str, Any]], step_s: float) -> dict[str, Any]:
    """Of each checkpoint that is there: GB, seconds from its last step until it is on the disk, and
    how long training stopped."""
    by_number = {step["step"]: step for step in steps}
    results: dict[str, list[float]] = {"save_gb": [], "save_s": [], "save_stops_s": []}
    for place in sorted(folder.glob("checkpoints/step_*")):
        number = int(place.name.removeprefix("step_"))
        before, after = by_number.get(number - 1), by_number.get(number)
        if before is None:
            continue
        files = [path.stat() for path in place.iterdir()]
        results["save_gb"].append(sum(each.st_size for each in files) / 1e9)
        results["save_s"].append(max(each.st_mtime for each in files) - before["time"])
        if after is not None:
            results["save_stops_s"].append(after["time"] - before["time"] - step_s)
    return results


def compare(row: dict[str, Any], against: Path) -> float:
    """The largest relative difference of a loss, of the steps that both runs took."""
    other = {step["step"]: step["loss"] for step in lines_of(against / "steps.rank0.jsonl")}
    both = [(loss, other[step]) for step, loss in row["losses"].items() if step in other]
    if not both:
        raise MotleyError(
            f"--against {against}: no step is of both runs; name a run that took some"
        )
    return max(abs(one / two - 1) for one, two in both)


def show(row: dict[str, Any]) -> None:
    """A screen for a terminal."""
    print(f"\n{row['parameters'] / 1e6:,.3f} million parameters, {row['mode']}, {row['ranks']} x "
          f"{row['device']}: {row['step_s']:.3g} s a step (foreseen "
          f"{row['predicted_step_s'] or float('nan'):.3g} s)")  # fmt: skip
    mfu = f", MFU {row['mfu']:.3f}" if row["mfu"] else ""
    print(f"  {row['tokens_per_s']:,.0f} tokens/s{mfu}, {row['spread']:.1%} apart")
    if row["memory_foreseen_mib"]:
        print(f"  memory {max(row['memory_peak_mib']):,.0f} MiB, foreseen "
              f"{max(row['memory_foreseen_mib']):,.0f}: {row['memory_error']:.1%} off")  # fmt: skip
    loaded = f", loaded in {row['load_s']:.1f} s" if row["load_s"] is not None else ""
    print(f"  started in {row['start_s']:.1f} s{loaded}")
    stops_s = [*row["save_stops_s"], None]
    for size, took, stops in zip(row["save_gb"], row["save_s"], stops_s, strict=False):
        stopped = f", training stopped for {stops:.1f} s" if stops is not None else ""
        print(f"  saved {size:.3g} GB in {took:.1f} s{stopped}")
    if "loss_difference" in row:
        print(f"  losses as those of the other run to {row['loss_difference']:.2g}")


def main(world: World, options: argparse.Namespace, config: Any, strategies: Any) -> None:
    """Train, and tell what the records say."""
    started = time.time()
    train(world, config, list_engines(config, strategies))
    if world.rank != 0:
        return
    row = measured(Path(config.logs) / config.run, options)
    if options.against:
        row["loss_difference"] = compare(row, options.against)
    show(row)
    if options.json:
        result.write(options.json, [row], started)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """This script's own options, and those of a training script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a tiny model, on processors too")
    parser.add_argument(
        "--recomputed", type=int, metavar="N", help="blocks whose activations are computed again, "
        "default: all"
    )  # fmt: skip
    parser.add_argument("--against", type=Path, metavar="RUN", help="compare losses with")
    options, others = parser.parse_known_args()
    options.zero = "--stage" in others or any(word.startswith("--stage=") for word in others)
    words = (SMALL if options.quick else LARGE).split()
    if options.zero or "--strategy" not in others:
        words.remove("--reshard-after-forward")
    if options.recomputed != 0:
        blocks = ",".join(f"blocks.{n}" for n in range(options.recomputed or 0)) or "blocks"
        words += ["--grad-checkpointing", blocks]
    return options, [*words, *TEXT, *others]


if __name__ == "__main__":
    given, words = arguments()
    known = known_strategies(ZERO if given.zero else TORCH)
    chosen = read_config(training_parser(str(__doc__), known), words)
    packages = chosen_strategy(chosen, known).packages
    run(lambda world: main(world, given, chosen, known), packages=packages)
