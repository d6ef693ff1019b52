"""Five unequal hosts: today's tools and Motley beside each other, against the limit, in one run.

    sudo .venv/bin/python benchmarks/mixed_lab.py --json benchmarks/results/mixed_lab.json
    sudo .venv/bin/python benchmarks/mixed_lab.py --quick --json /tmp/mixed_lab.json
    sudo .venv/bin/python benchmarks/mixed_lab.py --speeds 7:5:3:2:1 --n 180

Makes a lab (lab/unshaped.toml: five hosts, real ssh, gloo over TCP) and starts one mpirun job
on it, in which benchmarks/mixed_rank.py trains each way in turn: interleaved blocks, the order
reversed in every second repeat. Hosts are paced (benchmarks/paced.py): the computation is
real and small, and then sleeps until a host of that speed would be done. The limit is
measured before and after each repeat, on all hosts at once. Rates are medians; a spread is
(largest - smallest) / median. Needs root, for the lab, and: pip install accelerate
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(os.environ.get("MOTLEY_VENV", ROOT / ".venv"))
sys.path.insert(0, str(ROOT / "src"))

from motley.runs import commit, versions  # noqa: E402

LAB = f"bench{os.getpid()}"
MODES = ("plain-ddp", "accelerate", "deepspeed-0", "deepspeed-1", "motley-ddp",
         "motley-deepspeed-0", "motley-deepspeed-1")  # fmt: skip
KEYS = """
set -e
mkdir -p -m 700 .ssh
[ -e .ssh/id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519
cp .ssh/id_ed25519.pub .ssh/authorized_keys
ssh-keyscan -t ed25519 $(cut -d ' ' -f 1 hosts.txt) >.ssh/known_hosts 2>/dev/null
"""
SUBNET = "10.97.97.0/24"  # of lab/unshaped.toml


def lab(*words: object, stdin: str | None = None, stdout: int | None = None) -> str:
    """A command of lab.sh for our lab; what follows "--" goes last."""
    given = list(map(str, words))
    at = given.index("--") if "--" in given else len(given)
    command = ["bash", "lab/lab.sh", *given[:at], "--name", LAB, *given[at:]]
    done = subprocess.run(command, cwd=ROOT, input=stdin, text=True, check=False, stdout=stdout)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}")
    return done.stdout or ""


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Run the job; returns what its first rank measured."""
    words = [
        "--n", options.n, "--speeds", options.speeds, "--fastest-s", options.fastest_s, "--steps",
        options.steps, "--repeats", options.repeats, "--modes", ",".join(options.modes),
    ]  # fmt: skip
    script = (
        f"cd {ROOT} && export PATH={VENV}/bin:$PATH OMP_NUM_THREADS=1 && exec mpirun -np 5 "
        f"--hostfile ~/hosts.txt -x MOTLEY_VENV -x OMP_NUM_THREADS --mca btl_tcp_if_include "
        f"{SUBNET} --prtemca prte_if_include {SUBNET} ./entry_cn.sh benchmarks/mixed_rank.py "
        f"{' '.join(map(str, words))}"
    )
    lab("up", "--profile", "lab/unshaped.toml")
    try:
        lab("exec", "paced1", "--", "bash", stdin=KEYS)
        command = [
            "bash",
            "lab/lab.sh",
            "exec",
            "paced1",
            "--name",
            LAB,
            "--",
            "bash",
            "-c",
            script,
        ]
        job = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        results = []
        for line in job.stdout or ():
            kind, _, content = line.partition(" ")
            if kind == "RESULT":
                result = json.loads(content)
                results.append(result)
                print(f"  repeat {result['repeat'] + 1} of {options.repeats}: {result['mode']:<20} "
                      f"{result['step_s']:.3f} s a step", flush=True)  # fmt: skip
        if job.wait() != 0:
            raise SystemExit(f"the job ended with status {job.returncode}; see above")
    finally:
        lab("down")
    return results


def table(results: list[dict[str, object]], options: argparse.Namespace) -> list[dict[str, object]]:
    """One row a mode, and the limit."""
    times: dict[str, list[float]] = defaultdict(list)
    predicted: dict[str, list[float]] = defaultdict(list)
    for result in results:
        times[str(result["mode"])].append(float(result["step_s"]))
        if "predicted_s" in result:
            predicted[str(result["mode"])].append(float(result["predicted_s"]))
    limit = statistics.median(times["limit"])
    plain = statistics.median(times["plain-ddp"]) if "plain-ddp" in times else None
    speeds = [float(word) for word in options.speeds.split(":")]
    single = options.n * options.fastest_s  # the fastest host alone, as it is paced
    rows = []
    for mode, seconds in times.items():
        middle = statistics.median(seconds)
        forecast = statistics.median(predicted[mode]) if mode in predicted else None
        rows.append({
            "mode": mode, "engine": "deepspeed" if "deepspeed" in mode else "torch",
            "link": "unshaped", "n": options.n, "speeds": speeds,
            "images_per_s": options.n / middle,
            "fraction_of_limit": limit / middle, "times_plain_ddp": plain and plain / middle,
            "times_best_single": single / middle,
            "spread": (max(seconds) - min(seconds)) / middle, "step_s": middle,
            "predicted_s": forecast, "prediction_error": forecast and forecast / middle - 1,
            "repeats": seconds,
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, object]]) -> None:
    """The table, for a terminal."""
    heads = f"{'images/s':>9} {'of limit':>9} {'x plain DDP':>12} {'spread':>7} {'predicted':>10}"
    print(f"\n{'':<20} {heads}")
    for row in rows:
        error, times = row["prediction_error"], row["times_plain_ddp"]
        print(
            f"{row['mode']:<20} {row['images_per_s']:9.1f} {row['fraction_of_limit']:9.3f} "
            f"{'' if times is None else format(times, '12.2f'):>12} {row['spread']:7.1%} "
            f"{'' if error is None else format(error, '+10.1%'):>10}"
        )


def main() -> None:
    """Measure, show, write."""
    options = arguments()
    started, load = time.time(), os.getloadavg()
    rows = table(measure(options), options)
    show(rows)
    if options.json:
        packages = {name: importlib.metadata.version(name) for name in ("accelerate",)}
        content = {
            "rows": rows, "versions": {**versions(), **packages}, "commit": commit(),
            "command": " ".join(["python", *sys.argv]), "emulation": "paced",
            "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
            "seconds": time.time() - started,
            "cores": os.cpu_count(), "load_before": load,
        }  # fmt: skip
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one repeat, under two minutes")
    parser.add_argument("--n", type=int, default=180, help="global batch, default 180")
    parser.add_argument("--speeds", default="7:5:3:2:1", help="of the hosts, default 7:5:3:2:1")
    parser.add_argument("--fastest-s", type=float, default=0.012, metavar="SECONDS",
                        help="a sample on the fastest host, default 0.012")  # fmt: skip
    parser.add_argument("--steps", type=int, default=8, help="timed a block, default 8")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES),
                        help=f"default: {','.join(MODES)}")  # fmt: skip
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.steps, options.fastest_s = 1, 4, 0.006
    return options


if __name__ == "__main__":
    main()
