r"""Compute predictions of a trained model on all ranks, which do not wait for each other.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/infer_vit.py --checkpoint logs/RUN
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/infer_vit.py --checkpoint logs/RUN \
  --split train --out predictions/train --precision fp32
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/infer_vit.py --checkpoint logs/RUN \
  --images my/photos

The model may be of any task. The ranks form no process group. Each rank takes the next free shard
of samples, so a faster rank computes more shards. If a rank dies, the other ranks take over its
shards. If the command is interrupted, finished shards stay on the disk. Run the command again, on
any ranks, to compute the missing shards. OUT/predictions.csv then has all shards in order. OUT must
be on a disk that all hosts share.
"""

import argparse
import contextlib
import csv
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from motley.cluster.launcher import read_launch
from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.launch.process import die_with_parent, launched_local_rank, launched_rank
from motley.plan.precision import PRECISIONS
from motley.text import format_rate

_RENEW_S = 5.0
_PATIENCE_S = 1.0
GONE_S = 60.0  # NFS shows another machine's change of a time up to 30 s late


class Leases:
    """A context manager that takes leases for this process, and renews the leases until it exits.

    A lease is a file that gives one rank an exclusive right, such as to compute one shard.

    Args:
        folder: an existing folder that all ranks share.
        gone_s: seconds without a renewal after which the owner of a lease counts as lost.
    """

    def __init__(self, folder: Path, gone_s: float = GONE_S) -> None:
        self._folder, self._gone_s, self._host = folder, gone_s, os.uname().nodename
        self._owner = f"{self._host}.{os.getpid()}"
        self._held: set[Path] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> "Leases":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for path in list(self._held):
            self._drop(path)

    def take(self, name: str) -> bool:
        """Take a lease if it is free or its owner is lost. Return True if it was taken."""
        path = self._folder / f"{name}.lease"
        with self._locked(path) as file:
            if file is not None:
                if not self._is_gone(file):
                    return False
                file.seek(0)
                file.write(self._owner + "\n")
                file.truncate()
                self._held.add(path)
                return True
        try:
            with path.open("x") as file:
                file.write(self._owner + "\n")
        except FileExistsError:
            return False
        self._held.add(path)
        return True

    def is_free(self, name: str) -> bool:
        """Return True if the lease is free or its owner is lost."""
        try:
            with (self._folder / f"{name}.lease").open() as file:
                return self._is_gone(file)
        except FileNotFoundError:
            return True

    def drop(self, name: str) -> None:
        """Release a lease, so that another rank can take it."""
        self._drop(self._folder / f"{name}.lease")

    def _drop(self, path: Path) -> None:
        self._held.discard(path)
        with self._locked(path) as file:
            if file is not None and self._owns(file):
                path.unlink()

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[TextIO | None]:
        """Yield the file of a lease, locked against other ranks, or None if there is no file.

        A rank must check the owner and take the lease while it holds the lock. Otherwise two ranks
        could find a lost owner at the same time, and the second rank would take the lease that the
        first rank has just taken. A lost lease is therefore taken by overwriting the content of its
        file. The kernel releases the lock when a process ends. (NFS supports such locks, and a
        run's folder needs them, too.) Only a rank that holds the lock may unlink the file, so a
        locked file still has its name when it is written.
        """
        try:
            file = path.open("r+")
        except FileNotFoundError:
            yield None
            return
        with file:
            yield file if self._lock(file) and _is_at(file, path) else None

    def _lock(self, file: TextIO) -> bool:
        """Wait for the file's lock, and return True if it was obtained.

        Other ranks hold the lock for about a millisecond. The wait is limited, because a process
        that holds the lock may be frozen.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
            except OSError as error:
                raise MotleyError(
                    f"the file system of {self._folder} does not support locks "
                    f"({error.strerror}); choose a folder on another file system with --out"
                ) from None
            time.sleep(0.005)

    def _owns(self, file: TextIO) -> bool:
        file.seek(0)
        return file.read().strip() == self._owner

    def _is_gone(self, file: TextIO) -> bool:
        """Return True if the owner of a lease is lost.

        Times are compared by the disk's clock, because the clocks of hosts differ.
        """
        host, _, pid = file.read().strip().rpartition(".")
        if host == self._host and not Path("/proc", pid).exists():
            return True
        with tempfile.TemporaryFile(dir=self._folder) as new:
            now = os.fstat(new.fileno()).st_mtime
        return now - os.fstat(file.fileno()).st_mtime > self._gone_s

    def _renew(self) -> None:
        while not self._end.wait(min(_RENEW_S, self._gone_s / 4)):
            for path in list(self._held):
                # A network disk may fail for a moment, so the renewal is tried again and again.
                with contextlib.suppress(OSError, MotleyError), self._locked(path) as file:
                    if file is not None and self._owns(file):
                        os.utime(file.fileno())


def _is_at(file: TextIO, path: Path) -> bool:
    """Return True if an open file is still the file at this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


MERGED = "predictions.csv"


class Shards:
    """A folder with the predictions of all items, in one file per shard.

    Args:
        folder: path of the folder.
        items: number of all items.
        size: number of items per shard; the last shard may be smaller.
        columns: names of the columns of a row.
    """

    def __init__(self, folder: Path, items: int, size: int, columns: Sequence[str]) -> None:
        self.folder, self._items, self._size, self._columns = folder, items, size, columns
        self.count = -(-items // size)

    def open(self, about: Mapping[str, Any]) -> None:
        """Create the folder, or use an existing one with the same settings.

        Args:
            about: settings on which the predictions depend.

        Raises:
            MotleyError: the folder was created with other settings.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {**about, "items": self._items, "shard": self._size}
        path = self.folder / "about.json"
        new = path.with_name(f".about.{os.uname().nodename}.{os.getpid()}")
        new.write_text(json.dumps(own, indent=1, sort_keys=True) + "\n")
        try:
            os.link(new, path)  # atomic, and only the first process succeeds
        except FileExistsError:
            pass
        finally:
            new.unlink()
        try:
            result = json.loads(path.read_text())
        except ValueError as error:
            raise MotleyError(
                f"{path} cannot be read ({error}); give another folder with --out"
            ) from None
        if differing := [key for key in own | result if own.get(key) != result.get(key)]:
            text = ", ".join(f"{key} {result.get(key)} (now: {own.get(key)})" for key in differing)
            raise MotleyError(
                f"{self.folder} holds predictions of another model or of other data: {text}. Give "
                "another folder with --out, or the same options as before"
            )

    def name(self, number: int) -> str:
        """Return the name of a shard, which is also the name of its lease."""
        return f"shard.{number:05d}"

    def get_items(self, number: int) -> range:
        """Return the range of the indices of a shard's items."""
        return range(self._size * number, min(self._size * (number + 1), self._items))

    def path(self, number: int) -> Path:
        """Return the path of a shard's file."""
        return self.folder / f"{self.name(number)}.csv"

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are not written yet."""
        result = set(self.folder.glob("shard.*.csv"))
        return [n for n in range(self.count) if self.path(n) not in result]

    def write(self, number: int, rows: Iterable[Sequence[object]]) -> None:
        """Write the rows of a shard to its file, atomically."""
        self._write(self.path(number), rows)

    def merge(self) -> Path:
        """Write all shards into one file, in order, and return its path. All shards must exist.

        Raises:
            MotleyError: a shard has other columns or too few rows.
        """
        rows: list[list[str]] = []
        for number in range(self.count):
            path = self.path(number)
            csv.field_size_limit(2**30)  # a prediction may need more than the default of 128 KiB
            with path.open(newline="") as file:
                header, *shard = list(csv.reader(file)) or [[]]
            if header != [*self._columns]:
                raise MotleyError(
                    f"{path} has the columns {', '.join(header)}, and this run writes "
                    f"{', '.join(self._columns)}; remove the file, and run the same command again"
                )
            if len(shard) != len(self.get_items(number)):
                raise MotleyError(
                    f"{path} has {len(shard)} rows, and should have "
                    f"{len(self.get_items(number))}; remove the file, and run the same command "
                    "again"
                )
            rows += shard
        merged = self.folder / MERGED
        self._write(merged, rows)
        return merged

    def _write(self, path: Path, rows: Iterable[Sequence[object]]) -> None:
        new = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        with new.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self._columns)
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


_WORKER = "MOTLEY_INFER_WORKER"
_WAIT_S = 0.3
_START_S = 30.0  # limit for all ranks of a launch to start


def main() -> int:
    """Run :func:`work` in a subprocess, and return the exit code.

    mpirun ends all ranks if the process of a rank dies. This process therefore only waits for the
    subprocess. If the subprocess dies, this process waits for the other ranks to finish.
    """
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
    if code in (0, 2):  # done, or an error of the user that was printed
        return code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    leases = Leases(options.out)
    print_now(f"its worker {how}; the other ranks take over its part", rank)
    merged = options.out / MERGED
    others = [other for other in ranks() if other != rank]
    while not merged.exists() and (
        any(not leases.is_free(f"rank.{other}") for other in others)
        or (others and time.monotonic() - started < _START_S)
    ):
        time.sleep(_WAIT_S)
    if merged.exists():
        return 0
    cause = "" if code < 0 else "see the error above, then "
    print_now(
        f"no worker is left to finish; {cause}run the same command again for the missing part", rank
    )
    return 1


def ranks() -> range:
    """Return the numbers of all ranks of the launch."""
    return range(read_launch().size)


def print_now(text: str, rank: int) -> None:
    """Print a message with the rank's number and host to stderr, without buffering."""
    print(f"motley: rank {rank} on {os.uname().nodename}: {text}", file=sys.stderr, flush=True)


def work(options: argparse.Namespace) -> int:
    """Compute shards until none is missing, and return the exit code."""
    rank = launched_rank()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with Leases(options.out) as leases:
            leases.take(f"rank.{rank}")
            return compute(options, leases, rank)
    except MotleyError as error:
        print_now(str(error), rank)
        return 2


def compute(options: argparse.Namespace, leases: Leases, rank: int) -> int:
    """Open the model, compute missing shards, merge all shards, and return the exit code."""
    import torch  # imported here: the waiting process does not need it

    from motley.checkpoint.read import open_checkpoint
    from motley.infer.predictor import Predictor, open_trained, select_precision

    device = choose_device(leases, torch)
    if device is None:
        print_now("is left out, because other ranks have the GPUs of this host", rank)
        return 0
    trained = open_trained(options.checkpoint, options.data_dir, options.images, options.use_ema)
    for problem in trained.problems:
        print_now(f"not used: {problem}", rank)
    source = trained.task.data(held_out=options.split == "val")
    cores = len(os.sched_getaffinity(0))
    predictor = Predictor(
        trained,
        source,
        device,
        select_precision(options.precision, device),
        max(1, min(8, cores // 2)),
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
        first = rank * len(missing) // len(ranks())  # each rank starts elsewhere
        order = missing[first:] + missing[:first]
        number = next((n for n in order if leases.take(shards.name(n))), None)
        if number is None:  # other ranks compute the last shards, but may die
            time.sleep(_WAIT_S)
            continue
        if not shards.path(
            number
        ).exists():  # it may have been finished just before the lease was taken
            shards.write(number, predictor.rows(shards.get_items(number)))
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
    work = "there is nothing left to do"
    if done:
        rate = format_rate(record["samples_per_s"])
        work = f"{predictor.samples} {noun}s, {rate} {noun}s/s"
    print(
        f"rank {rank} on {record['host']}: {device}, {predictor.precision}, "
        f"{work}, {predictor.mem_peak_mib:,.0f} MiB", flush=True
    )  # fmt: skip
    if leases.take("merge") and not (options.out / MERGED).exists():
        print_result(shards.merge(), noun)
    elif not done and rank == 0:
        print_result(options.out / MERGED, noun)  # all shards had been finished before
    return 0


def choose_device(leases: Leases, torch: Any) -> Any:
    """Return a GPU that no other rank uses, or the CPU on a host without GPUs.

    None: other ranks use all GPUs.
    """
    count = torch.cuda.device_count()
    if not count:
        return torch.device("cpu")
    first = launched_local_rank(0, os.environ)
    for index in ((first + k) % count for k in range(count)):
        if leases.take(f"gpu.{torch.cuda.get_device_properties(index).uuid}"):
            torch.cuda.set_device(index)
            return torch.device("cuda", index)
    return None


def print_result(path: Path, noun: str) -> None:
    """Print the path of the predictions, and the accuracy if the labels are known."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = [row for row in rows if row.get("label") and row.get("confidence")]
    right = sum(row["label"] == row["predicted"] for row in known)
    print(
        f"{path}: {len(rows)} {noun}s" + (f", top-1 {right / len(known):.2%}" if known else ""),
        flush=True,
    )


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = OneVoice(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, metavar="PATH",
                        help="a run's folder, or one of its checkpoints")  # fmt: skip
    parser.add_argument("--split", choices=("val", "train"), default="val",
                        help="split of the data set that the model was trained on; default val"
                        )  # fmt: skip
    parser.add_argument("--images", type=Path, metavar="DIR",
                        help="images of your own, at any depth, instead of --split")  # fmt: skip
    parser.add_argument("--data-dir", metavar="DIR", help="default: as in training")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="default: predictions-SPLIT in the run's folder")  # fmt: skip
    parser.add_argument("--shard", type=int, default=64, metavar="N",
                        help="images that a rank computes at a time, default 64")  # fmt: skip
    parser.add_argument(
        "--use-ema",
        action="store_true",
        help=("for a run with --model-ema: use the averaged parameters"),
    )
    parser.add_argument("--precision", choices=("auto", *PRECISIONS), default="auto")
    options = parser.parse_args()
    if options.checkpoint is None:  # a required option would hide a misspelt --checkpoint
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
