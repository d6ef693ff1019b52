"""Trainers of other frameworks on five unequal ranks: by themselves and with Motley, in turn.

    python benchmarks/frameworks.py --json benchmarks/results/frameworks.json
    python benchmarks/frameworks.py --quick --json /tmp/frameworks.json

The Trainer of transformers, a loop on Accelerate and a Lightning module train the same network on
five ranks of this machine, whose devices are paced at 7:5:3:2:1: a pass is real and small, and then
sleeps until a device of that speed would be done. By itself a framework gives all ranks equal
batches, under torchrun. With Motley the ranks find their shares. A rate is that of the steps after
the first ones (--settle). The limit is the sum of the paced devices. Needs:
pip install "transformers[torch]" accelerate lightning
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import result
import torch
from result import ROOT, VENV
from speeds import list_rates, parse_speeds
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

FRAMEWORKS = ("transformers", "accelerate", "lightning")
WAYS = ("by itself", "with motley")
WIDTH = 16


class _Sleep(torch.autograd.Function):
    """Let the backward pass of some rows take as long as on a slower device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Network(nn.Module):
    """A small regression on a device of a given speed, with the interface of transformers' models.

    Args:
        row_s: seconds per row, forward and backward pass.
    """

    def __init__(self, row_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1))
        self._row_s = row_s

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the mean loss of the rows."""
        seconds = self._row_s * len(x)
        time.sleep(seconds / 3)
        each = (self.layers(_Sleep.apply(x.requires_grad_(), seconds * 2 / 3))[:, 0] - y) ** 2  # type: ignore[no-untyped-call]
        return {"loss": each.mean() if len(x) else each.sum()}


class Rows(Dataset[Any]):
    """Random rows."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.x[index].sum()}


def train(framework: str, way: str, options: argparse.Namespace) -> None:
    """Train on this rank; rank 0 prints the time of each step."""
    torch.set_num_threads(1)
    lab: Any = None
    if way == WAYS[1]:
        import motley

        lab = motley.join(logs=options.records, precision="fp32")
    rank = lab.rank if lab else int(os.environ["RANK"])
    ranks = lab.size if lab else int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    rates = list_rates(parse_speeds(options.speeds), options.fastest_s)
    network = Network(1 / rates[rank])
    rows = Rows(options.batch * options.steps)
    ends: list[float] = []
    register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    trains = {"transformers": _transformers, "accelerate": _accelerate, "lightning": _lightning}
    trains[framework](network, rows, lab, ranks, options)
    if rank == 0:
        print(f"ENDS {json.dumps(ends)}", flush=True)


def _transformers(
    network: nn.Module, rows: Rows, lab: Any, ranks: int, options: argparse.Namespace
) -> None:
    import transformers

    if lab:
        from motley.library.integrations.transformers import Trainer
    else:
        from transformers import Trainer
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=options.batch // ranks, num_train_epochs=1,
        save_strategy="no", report_to=[], logging_strategy="no", disable_tqdm=True, use_cpu=True,
        ddp_backend=None if lab else "gloo", learning_rate=1e-3,
    )  # fmt: skip
    Trainer(model=network, args=arguments, train_dataset=rows).train()


def _accelerate(
    network: nn.Module, rows: Rows, lab: Any, ranks: int, options: argparse.Namespace
) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if lab:
        accelerator = lab.accelerate(accelerator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loader = DataLoader(rows, batch_size=options.batch // (1 if lab else ranks), shuffle=True)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def _lightning(
    network: nn.Module, rows: Rows, lab: Any, ranks: int, options: argparse.Namespace
) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            loss: Tensor = self.network(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if lab:
        from motley.library.integrations.lightning import MotleyStrategy

        strategy = MotleyStrategy()
    trainer = lightning.Trainer(
        strategy=strategy, devices=1 if lab else ranks, accelerator="cpu", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    batch = options.batch // (1 if lab else ranks)
    trainer.fit(Module(), DataLoader(rows, batch_size=batch, shuffle=True))


def measure(framework: str, way: str, options: argparse.Namespace) -> float:
    """Start five ranks; return their seconds per step after the first steps."""
    ranks = str(len(options.speeds.split(":")))
    steps = options.steps if way == WAYS[1] else options.settle // 2 + 4
    settle = options.settle if way == WAYS[1] else 2
    words = [str(Path(__file__)), "--rank-of", framework, way, "--batch", str(options.batch),
             "--speeds", options.speeds, "--fastest-s", str(options.fastest_s),
             "--steps", str(steps)]  # fmt: skip
    with tempfile.TemporaryDirectory() as logs:
        words += ["--records", logs]
        if way == WAYS[1]:
            launcher = [str(VENV / "bin" / "mpirun"), "-np", ranks, "--host", f"localhost:{ranks}",
                        sys.executable]  # fmt: skip
        else:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
        done = subprocess.run(
            [*launcher, *words], cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("ENDS")]
    # Ranks of torchrun's may abort at their end, after the last step.
    if not lines or (done.returncode and way == WAYS[1]):
        raise SystemExit(f"{framework} {way}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    ends = json.loads(lines[0].partition(" ")[2])[settle:]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def main() -> None:
    """Measure all, show, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=180, help="global batch, default 180")
    parser.add_argument("--speeds", default="7:5:3:2:1", help="of the ranks, default 7:5:3:2:1")
    parser.add_argument("--fastest-s", type=float, default=0.012, metavar="SECONDS",
                        help="a row on the fastest rank, default 0.012")  # fmt: skip
    parser.add_argument("--steps", type=int, default=40, help="of a run with Motley, default 40")
    parser.add_argument("--settle", type=int, default=20, help="steps not timed, default 20")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--records", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(*options.rank_of, options)
        return
    started, load = time.time(), os.getloadavg()
    speeds = parse_speeds(options.speeds)
    limit = options.batch / sum(list_rates(speeds, options.fastest_s))
    rows = []
    for framework in FRAMEWORKS:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(1 if options.quick else options.repeats):
            for way in WAYS if repeat % 2 == 0 else WAYS[::-1]:
                seconds[way].append(measure(framework, way, options))
        alone = statistics.median(seconds[WAYS[0]])
        for way, each in seconds.items():
            step_s = statistics.median(each)
            rows.append({
                "framework": framework, "way": way, "n": options.batch, "step_s": step_s,
                "fraction_of_limit": limit / step_s, "times_alone": alone / step_s,
                "spread": (max(each) - min(each)) / step_s, "repeats": each,
            })  # fmt: skip
            print(f"{framework:<14}{way:<13}{step_s:7.3f} s a step  {limit / step_s:.3f} of the "
                  f"limit  {alone / step_s:.2f} times  spread "
                  f"{rows[-1]['spread']:.1%}", flush=True)  # fmt: skip
    if options.json:
        result.write(options.json, rows, started, speeds=speeds, limit_s=limit, load_before=load,
                     emulation="paced")  # fmt: skip


if __name__ == "__main__":
    main()
