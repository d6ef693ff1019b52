"""Classify images with a trained model on all ranks, none of which waits for another.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/infer_vit.py --checkpoint logs/RUN
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/infer_vit.py --checkpoint logs/RUN \\
  --split train --out predictions/train --precision fp32
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/infer_vit.py --checkpoint logs/RUN \\
  --images my/photos

There is no process group: each rank takes the next shard of images that nobody has, so a fast one
takes more, and the death of one leaves the rest working; they take over what it had. What is done
stays done: run the same line again, on any ranks, and it computes what is missing. All shards in
order are then in OUT/predictions.csv. OUT has to be on a disk that all hosts share.
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from motley.cluster.launcher import launch_of
from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.infer.shards import MERGED, Leases, Shards
from motley.launch.process import die_with_parent, launched_local_rank, launched_rank
from motley.plan.precision import PRECISIONS
from motley.text import rate_in_words

_WORKER = "MOTLEY_INFER_WORKER"
_WAIT_S = 0.3
_START_S = 30.0  # in which the ranks of a launch have begun, or never will


def main() -> int:
    """The launcher's child watches over a process of its own, which works: were the launcher to
    see that one die, it would end all."""
    die_with_parent()
    options = arguments()
    if os.environ.get(_WORKER):
        return work(options)
    rank, started = launched_rank(), time.monotonic()
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", __spec__.name, *sys.argv[1:]],
        env={**os.environ, _WORKER: "1"},
    )
    code = worker.wait()
    if code in (0, 2):  # done, or what is wrong with the options is said
        return code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    leases = Leases(options.out)
    say(f"its worker {how}; the other ranks take over what it had", rank)
    merged = options.out / MERGED
    others = [other for other in ranks() if other != rank]
    while not merged.exists() and (
        any(not leases.is_free(f"rank.{other}") for other in others)
        or (others and time.monotonic() - started < _START_S)
    ):
        time.sleep(_WAIT_S)
    if merged.exists():
        return 0
    cause = "" if code < 0 else "see to the error above, then "
    say(f"nobody is left to finish; {cause}run the same line again for what is missing", rank)
    return 1


def ranks() -> range:
    """Return the ranks of the launch."""
    return range(launch_of().size)


def say(text: str, rank: int) -> None:
    """To the user, at once."""
    print(f"motley: rank {rank} on {os.uname().nodename}: {text}", file=sys.stderr, flush=True)


def work(options: argparse.Namespace) -> int:
    """Shards, until none is missing."""
    rank = launched_rank()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with Leases(options.out) as leases:
            leases.take(f"rank.{rank}")
            return compute(options, leases, rank)
    except MotleyError as error:
        say(str(error), rank)
        return 2


def compute(options: argparse.Namespace, leases: Leases, rank: int) -> int:
    """See :func:`work`."""
    import torch  # slow, and of no use to who only watches

    from motley.checkpoint.read import open_checkpoint
    from motley.infer.predictor import Predictor, open_trained, precision_of

    device = choose_device(leases, torch)
    if device is None:
        say("is left out: the GPUs of this host are with other ranks", rank)
        return 0
    trained = open_trained(options.checkpoint, options.data_dir, options.images, options.use_ema)
    for problem in trained.problems:
        say(f"not used: {problem}", rank)
    source = trained.task.data(held_out=options.split == "val")
    cores = len(os.sched_getaffinity(0))
    predictor = Predictor(
        trained, source, device, precision_of(options.precision, device), max(1, min(8, cores // 2))
    )
    shards = Shards(options.out, len(source), options.shard, predictor.columns)
    shards.open({
        "model": open_checkpoint(trained.folder).digest("ema" if options.use_ema else "model"),
        "checkpoint": trained.folder.name,
        "task": trained.task.title(),
        "split": str(options.images.resolve()) if options.images else options.split,
    })  # fmt: skip
    done = 0
    while missing := shards.missing():
        first = rank * len(missing) // len(ranks())  # each begins elsewhere
        order = missing[first:] + missing[:first]
        number = next((n for n in order if leases.take(shards.name(n))), None)
        if number is None:  # the others are at the last ones; one of them may die
            time.sleep(_WAIT_S)
            continue
        if not shards.path(number).exists():  # else it was finished just before it was taken
            shards.write(number, predictor.rows(shards.items_of(number)))
            done += 1
        leases.drop(shards.name(number))
    record: dict[str, Any] = {
        "rank": rank, "host": os.uname().nodename, "device": str(device),
        "precision": predictor.precision, "shards": done, "samples": predictor.samples,
        "samples_per_s": predictor.samples / predictor.seconds if done else None,
        "mem_peak_mib": predictor.mem_peak_mib,
    }  # fmt: skip
    (options.out / f"rank.{rank}.json").write_text(json.dumps(record) + "\n")
    noun = trained.task.noun
    work = "nothing was left to do"
    if done:
        rate = rate_in_words(record["samples_per_s"])
        work = f"{predictor.samples} {noun}s, {rate} {noun}s/s"
    print(
        f"rank {rank} on {record['host']}: {device}, {predictor.precision}, "
        f"{work}, {predictor.mem_peak_mib:,.0f} MiB", flush=True
    )  # fmt: skip
    if leases.take("merge") and not (options.out / MERGED).exists():
        tell(shards.merge(), noun)
    elif not done and rank == 0:
        tell(options.out / MERGED, noun)  # there was nothing left to do
    return 0


def choose_device(leases: Leases, torch: Any) -> Any:
    """A GPU that no other rank has, or the CPU of a host without; None if all are taken."""
    count = torch.cuda.device_count()
    if not count:
        return torch.device("cpu")
    first = launched_local_rank(0, os.environ)
    for index in ((first + k) % count for k in range(count)):
        if leases.take(f"gpu.{torch.cuda.get_device_properties(index).uuid}"):
            torch.cuda.set_device(index)
            return torch.device("cuda", index)
    return None


def tell(path: Path, noun: str) -> None:
    """Where the predictions are, and how many are right, where that is known."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = [row for row in rows if row.get("label")]
    right = sum(row["label"] == row["predicted"] for row in known)
    print(
        f"{path}: {len(rows)} {noun}s" + (f", top-1 {right / len(known):.2%}" if known else ""),
        flush=True,
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = OneVoice(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, metavar="PATH",
                        help="a run's folder, or one of its checkpoints")  # fmt: skip
    parser.add_argument("--split", choices=("val", "train"), default="val",
                        help="of the data set that it was trained on; default val")  # fmt: skip
    parser.add_argument("--images", type=Path, metavar="DIR",
                        help="of your own, at any depth, in place of --split")  # fmt: skip
    parser.add_argument("--data-dir", metavar="DIR", help="default: as in training")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="default: predictions-SPLIT in the run's folder")  # fmt: skip
    parser.add_argument("--shard", type=int, default=64, metavar="N",
                        help="images that a rank takes at a time, default 64")  # fmt: skip
    parser.add_argument(
        "--use-ema", action="store_true", help="of a run with --model-ema: what it has averaged"
    )
    parser.add_argument("--precision", choices=("auto", *PRECISIONS), default="auto")
    options = parser.parse_args()
    if options.checkpoint is None:  # argparse would ask for it before it names a misspelt one
        parser.error("give a trained model, as in --checkpoint logs/RUN")
    if options.shard < 1:
        parser.error(f"--shard {options.shard} is not 1 or more")
    run = options.checkpoint
    while run.name == "checkpoints" or run.name.startswith("step_"):
        run = run.parent
    of = "images" if options.images else options.split
    options.out = options.out or run / f"predictions-{of}{'-ema' if options.use_ema else ''}"
    return options


if __name__ == "__main__":
    sys.exit(main())
