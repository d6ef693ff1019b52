"""torch_dist/baseline_measure.py on five hosts of the lab in a box: who keeps what, and scaling.

    sudo .venv/bin/python benchmarks/baselines_lab.py strategies
    sudo .venv/bin/python benchmarks/baselines_lab.py strong weak --repeats 3
    sudo .venv/bin/python benchmarks/baselines_lab.py --quick

strategies: lab/tesla.toml, its processors and links; four cells are made to run out of memory, to
hang, to turn to NaN and to be killed. strong, weak: five paced hosts, 7:5:3:2:1, whose links have
no limit. Tables and pictures go to benchmarks/results/, or --out. Needs root, for the lab.
"""

import argparse
import base64
from pathlib import Path

from bench_lab import READY, BenchLab, bench_lab
from result import ROOT

MATRICES = {
    "strategies": "strategies_lab.toml", "strong": "scaling_strong.toml",
    "weak": "scaling_weak.toml",
}  # fmt: skip
_KEPT = ("results.md", "results.csv", "baselines.png")


def measure(lab: BenchLab, name: str, repeats: int, only: str) -> None:
    """One matrix, in the home of the lab's user."""
    lab.on_head(
        f"{READY} && python torch_dist/baseline_measure.py --matrix benchmarks/{MATRICES[name]} "
        f"--repeats {repeats} --only '{only}' --hostfile ~/hosts.txt --out ~/{name} "
        f"--mpirun '{lab.mpirun}' "
        f">&2; python plots/plot_baselines.py ~/{name} >&2"
    )


def main() -> None:
    """Measure each matrix in a lab of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "matrices",
        nargs="*",
        choices=[*MATRICES, []],
        metavar="MATRIX",
        help=f"{', '.join(MATRICES)}; default: all",
    )
    parser.add_argument("--repeats", type=int, default=1, help="default 1")
    parser.add_argument("--quick", action="store_true", help="two hosts of strong scaling")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    options = parser.parse_args()
    names = ["strong"] if options.quick else options.matrices or list(MATRICES)
    for name in names:
        tesla = (ROOT / "lab" / "tesla.toml").read_text() if name == "strategies" else None
        with bench_lab(tesla) as lab:
            measure(lab, name, options.repeats, "hosts2" if options.quick else "")
            for file in _KEPT:
                content = base64.b64decode(lab.on_head(f"base64 ~/{name}/{file}"))
                (options.out / f"baselines_{name}.{file.partition('.')[2]}").write_bytes(content)


if __name__ == "__main__":
    main()
