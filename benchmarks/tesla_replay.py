"""The real lab of lab/tesla.toml again: what its people did, and what Motley does there.

    sudo .venv/bin/python benchmarks/tesla_replay.py --json benchmarks/results/tesla_replay.json
    sudo .venv/bin/python benchmarks/tesla_replay.py --quick --json /tmp/tesla_replay.json

Five machines trained 4.83 times slower than one there. The figures of their own log (--facts)
set the pace here: what each GPU computes and how long its optimizer step takes, in fp32 and in its
best precision, and what each link carries. Their model's gradient is 192 times as large as that of
the model here, so the links of the lab in a box are so much slower; a time here is --slower times
a time there, so that it does not count that two processors do the work of five hosts (PowerSGD's
arithmetic, above all). Every case is the real script, from measuring to the last step; where a case
is said to be in 16 bits, its pace is, while it computes in fp32. The limit is the sum of what the
machines do alone. Needs root, for the lab.
"""

import argparse
import json
import math
import os
import re
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import result
from bench_lab import BenchLab, bench_lab

from motley.plan.plan import limit_s
from motley.plan.speeds import SpeedTable
from motley.records.costs import mean_rate

_FACTS = result.ROOT / "lab" / "tesla_lab.json"
_GRADIENT = 1_802_920  # bytes, of vit_digits
_WARM = 2  # steps; PowerSGD begins after them
_TCP = 0.955  # of a link's rate are what it carries for TCP
HOSTS = ("ecetesla0", "ecetesla1", "ecetesla2", "ecetesla3", "ecetesla4")
CARDS = ("P4", "3070", "3070", "GTX 1070", "3070")
_HEADLINE, _THEIRS = "motley, auto, N = 512", "theirs: all five"


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        best: each GPU at its best precision, else in fp32. words: of the script, besides.
        n: samples in a step. recorded_s: seconds of an epoch in the lab's own log, if it did that.
    """

    n: int
    words: str
    best: bool = True
    recorded_s: float | None = None


def cases(epochs: dict[str, float]) -> dict[str, Case]:
    """By name; what the lab did as it did it: equal shares, fp32, DeepSpeed stage 0 on several."""
    theirs = "--engine deepspeed --wire exact --replan off --shares"
    fast = "ecetesla1,ecetesla2,ecetesla4"
    ours = "--hosts auto --wire auto"
    return {
        "theirs: one 3070": Case(16, "--hosts ecetesla1 --shares equal", False, epochs["1 x 3070"]),
        "theirs: three 3070": Case(48, f"{theirs} equal --hosts {fast}", False, epochs["3 x 3070"]),
        "theirs: and the P4": Case(
            64, f"{theirs} equal --hosts ecetesla0,{fast}", False, epochs["3 x 3070 + P4"]
        ),
        _THEIRS: Case(80, f"{theirs} equal --hosts all", False, epochs["3 x 3070 + P4 + GTX 1070"]),
        "best machine, N = 80": Case(80, "--hosts ecetesla1"),
        "best machine, N = 512": Case(512, "--hosts ecetesla1"),
        "best machine, N = 1024": Case(1024, "--hosts ecetesla1"),
        "motley, auto, N = 80": Case(80, ours),
        _HEADLINE: Case(512, ours),
        "motley, auto, N = 1024": Case(1024, ours),
        "motley, powersgd:4, N = 512": Case(512, "--hosts all --wire powersgd:4"),
        "motley, powersgd:8, N = 512": Case(512, "--hosts all --wire powersgd:8"),
    }


class Replay:
    """The lab's figures, in the lab in a box.

    Attributes:
        profile: lab/tesla.toml with its links. epochs: seconds of an epoch in fp32, by
            the GPUs, from the lab's log.
    """

    def __init__(self, path: Path, slower: float) -> None:
        facts = json.loads(path.read_text())
        self.slower, self._facts = slower, facts
        scale = _GRADIENT / facts["gradient_bytes_fp32"] / slower
        fast, slow = (
            8e-6 * scale * self._carries(ranks, count) / _TCP
            for ranks, count in (("3 x 3070", 3), ("3 x 3070 + P4 + GTX 1070", 5))
        )
        text = (result.ROOT / "lab" / "tesla.toml").read_text()
        text = re.sub(r"(?m)^cpus = .*\n", "", text)
        text = re.sub(r"(?m)^(up|down)_mbit = 200$", rf"\1_mbit = {fast:.3f}", text)
        self.profile = re.sub(r"(?m)^(up|down)_mbit = 20$", rf"\1_mbit = {slow:.3f}", text)
        self.epochs = {
            row["ranks"]: row["seconds"]
            for row in facts["epoch_seconds"] if row["precision"] == "fp32"
        }  # fmt: skip

    def _step(self, ranks: str, precision: str) -> dict[str, Any]:
        rows: list[dict[str, Any]] = self._facts["step_ms"]
        return next(r for r in rows if (r["ranks"], r["precision"]) == (ranks, precision))

    def _carries(self, ranks: str, count: int) -> float:
        """Bytes a second of the slowest link, from what a ring all-reduce took."""
        sent = 2 * (count - 1) / count * float(self._facts["gradient_bytes_fp32"])
        return sent / self._step(ranks, "fp32")["all_reduce"] * 1000

    def pace(self, best: bool) -> tuple[list[float], list[float]]:
        """Samples a second of each machine, and seconds of its optimizer step."""
        steps = {
            "P4": self._step("P4", "fp32"), "3070": self._step("3070", "fp16" if best else "fp32"),
        }  # fmt: skip
        rates = {card: step["images_per_s_forward_backward"] for card, step in steps.items()}
        opt = {card: step["optimizer"] / 1000 for card, step in steps.items()}
        rates["GTX 1070"] = self._facts["gtx_1070_images_per_s_fp32"]["value"]
        opt["GTX 1070"] = opt["P4"]  # not in the log
        return [rates[c] / self.slower for c in CARDS], [opt[c] * self.slower for c in CARDS]

    def run(self, lab: BenchLab, case: Case, name: str, steps: int) -> dict[str, Any]:
        """Train one case; seconds of a step as they would be in the real lab."""
        rates, opt = self.pace(case.best)
        precisions = ["bf16" if case.best and card == "3070" else "fp32" for card in CARDS]
        hosts = re.search(r"--hosts (ecetesla\S+)", case.words)
        saved = hosts[1].split(",") if hosts else HOSTS
        given = [p for p, host in zip(precisions, HOSTS, strict=True) if host in saved]
        text = list(lab.train(
            "benchmarks/paced_train.py", "--rates", ",".join(map(str, rates)), "--optimizer-s",
            ",".join(map(str, opt)), "--slower", self.slower, *case.words.split(),
            "--batch-size", case.n, "--no-augment", "--precision", ",".join(given),
            "--logs", "~/logs", "--run", name,
            "--epochs", 1000, "--max-steps", steps + _WARM,
            "--save-every", 10**6,
        ))  # fmt: skip
        results = lab.records(name)
        full = [step for step in results["steps"][_WARM:] if step["n_global"] == case.n]
        seconds = [step["n_global"] / step["samples_per_s"] for step in full]
        plan = results["run"]["plan"]
        forecast = plan["forecast"] or {}
        return {
            "step_s": statistics.median(seconds) / self.slower,
            "mean_images_per_s": (mean_rate(results["steps"][_WARM:]) or math.nan) * self.slower,
            "predicted_s": forecast and forecast["step_s"] / self.slower,
            "wire": plan["wire"], "counts": plan["counts"],
            "hosts": [rank["host"] for rank in results["run"]["ranks"]],
            "left_out": [entry["reason"] for entry in results["run"]["left_out"]],
            "advice": results["run"]["advice"], "said": text,
        }  # fmt: skip

    def limit(self, n: int) -> float:
        """Seconds of a step in the real lab if nobody waited and nothing was sent."""
        rates, opt = self.pace(best=True)
        speeds = [SpeedTable((1,), (1 / r,), o) for r, o in zip(rates, opt, strict=True)]
        return limit_s(n, speeds) / self.slower


def rows(
    replay: Replay, known: dict[str, Case], found: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """One row a case."""

    def rate(name: str) -> float:
        return known[name].n / statistics.median(run["step_s"] for run in found[name])

    table = []
    for name, runs in found.items():
        case, seconds = known[name], [run["step_s"] for run in runs]
        step_s, forecast = statistics.median(seconds), runs[-1]["predicted_s"]
        best = f"best machine, N = {case.n}"
        table.append({
            "mode": name, "engine": "deepspeed" if "deepspeed" in case.words else "torch",
            "link": "tesla", "n": case.n, "step_s": step_s, "images_per_s": case.n / step_s,
            "mean_images_per_s": statistics.median(run["mean_images_per_s"] for run in runs),
            "fraction_of_limit": replay.limit(case.n) / step_s,
            "times_best_single": rate(name) / rate(best) if best in found else None,
            "times_what_they_did": rate(name) / rate(_THEIRS) if _THEIRS in found else None,
            "epoch_s": 50_000 / (case.n / step_s), "recorded_epoch_s": case.recorded_s,
            "predicted_s": forecast or None,
            "prediction_error": forecast / step_s - 1 if forecast else None,
            "spread": (max(seconds) - min(seconds)) / step_s, "repeats": seconds,
            **{key: runs[-1][key] for key in ("wire", "counts", "hosts", "left_out")},
        })  # fmt: skip
    return table


def show(table: list[dict[str, Any]]) -> None:
    """The table, for a terminal."""
    heads = (
        "images/s",
        "mean",
        "epoch, s",
        "in its log",
        "x best one",
        "x theirs",
        "of limit",
        "predicted",
    )
    print(f"\n{'':<28}" + "".join(f"{head:>12}" for head in heads) + "  wire, samples")
    for row in table:
        cells = (
            f"{row['images_per_s']:.1f}", f"{row['mean_images_per_s']:.1f}",
            f"{row['epoch_s']:,.0f}",
            f"{row['recorded_epoch_s']:,.0f}" if row["recorded_epoch_s"] else "",
            f"{row['times_best_single']:.2f}" if row["times_best_single"] else "",
            f"{row['times_what_they_did']:.1f}" if row["times_what_they_did"] else "",
            f"{row['fraction_of_limit']:.3f}",
            f"{row['prediction_error']:+.1%}" if row["prediction_error"] is not None else "",
        )  # fmt: skip
        counts = "+".join(map(str, row["counts"]))
        print(
            f"{row['mode']:<28}" + "".join(f"{c:>12}" for c in cells) + f"  {row['wire']}, {counts}"
        )
    headline = next((row for row in table if row["mode"] == _HEADLINE), None)
    for reason in headline["left_out"] if headline else ():
        print(f"left out: {reason}")


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Seconds of an epoch, beside what the lab's log says."""
    shown = table[::-1]
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.4 * len(shown)), layout="constrained")
    for place, row in enumerate(shown):
        ours = row["mode"].startswith("motley")
        axes.barh(place, row["epoch_s"], height=0.62, color="tab:blue" if ours else "0.65")
        axes.text(row["epoch_s"] * 1.04, place, f"{row['epoch_s']:,.0f} s", va="center", fontsize=9)
        if row["recorded_epoch_s"]:
            axes.plot(row["recorded_epoch_s"], place, "k|", markersize=16)
    axes.plot([], [], "k|", markersize=12, label="the lab's own log")
    axes.set(
        xscale="log", yticks=range(len(shown)), yticklabels=[row["mode"] for row in shown],
        xlabel="seconds of an epoch of 50,000 images, as in the real lab",
        title="A real lab of five machines, replayed",
    )  # fmt: skip
    axes.set_xlim(10, 2.2 * max(row["epoch_s"] for row in shown))
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Train every case in turn, some times over; show, write."""
    options = arguments()
    started, load = time.time(), os.getloadavg()
    replay = Replay(options.facts, options.slower)
    known = cases(replay.epochs)
    wanted = {n: c for n, c in known.items() if options.only is None or options.only in n}
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with bench_lab(replay.profile) as lab:
        for repeat in range(options.repeats):
            for place, name in enumerate(wanted if repeat % 2 == 0 else [*wanted][::-1]):
                run = replay.run(lab, wanted[name], f"r{repeat}c{place}", options.steps)
                results[name].append(run)
                print(f"  repeat {repeat + 1} of {options.repeats}: {name:<28}"
                      f"{run['step_s']:7.3f} s a step", flush=True)  # fmt: skip
    table = rows(replay, known, {name: results[name] for name in wanted})
    show(table)
    if options.json:
        draw(table, options.json.with_suffix(".png"))
        result.write(options.json, table, started, slower=options.slower, load_before=load)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="and a picture beside it")
    parser.add_argument("--quick", action="store_true", help="one repeat of 2 steps")
    parser.add_argument("--facts", type=Path, default=_FACTS, metavar="FILE",
                        help="the lab's figures, default lab/tesla_lab.json")  # fmt: skip
    parser.add_argument("--only", metavar="WORDS", help="the cases with these words in their name")
    parser.add_argument("--slower", type=float, default=2.0, metavar="TIMES", help="default 2")
    parser.add_argument("--steps", type=int, default=4, help="timed in each run, default 4")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.steps = 1, 2
    return options


if __name__ == "__main__":
    main()
