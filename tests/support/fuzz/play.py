"""Plays a case: its jobs one after another, and between them what happens to its files."""

import contextlib
import hashlib
import json
import random
import shutil
import struct
import tempfile
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from fuzz.cases import BAD_IMAGES, Case, Segment
from fuzz.reference import Reference
from PIL import Image
from warm.ranks import Ended, WarmRanks
from warm.script import MODULES as RANK_MODULES

from motley.config.options import Config
from motley.engines.strategies import TORCH, ZERO, known_strategies
from motley.train.command_line import read_config, training_parser

BODY = "fuzz.rank:main"
MODULES = ("fuzz.rank", *RANK_MODULES)
LIMIT = 120.0  # seconds of a job; one takes two or so, or 40 where others want the cores


@dataclass
class Job:
    """What became of a segment.

    Attributes:
        start: steps that had been taken when it began.
        trace: by rank, what each saw; see fuzz.rank.
    """

    segment: Segment
    ended: Ended
    start: int
    trace: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def said(self) -> list[str]:
        """Its lines for the user."""
        return [line for line in self.ended.output.splitlines() if line.startswith("motley: ")]

    @property
    def killed(self) -> bool:
        """A fault of the case killed it."""
        return any(self.ended.codes) and any(f.kind == "kill" for f in self.segment.faults)


@dataclass
class Played:
    """A case that was played, to its end or to a job that failed."""

    case: Case
    folder: Path
    jobs: list[Job]

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "logs" / "run"

    @property
    def is_rescued(self) -> bool:
        """A surviving rank has saved what all ranks hold alike; what each alone held is lost: its
        part of running statistics, its local steps, its wire's error feedback."""
        return any(job.killed and "saved as of step" in job.ended.output for job in self.jobs)

    @property
    def is_estimated(self) -> bool:
        """The running statistics of batch norms are an estimate."""
        return self.case.recipe.by_batch and self.is_rescued

    def config(self, number: int) -> Config:
        """The options of a segment."""
        return config_of(self.case, number, self.folder)


def config_of(case: Case, number: int, folder: Path) -> Config:
    """The options of a segment, parsed."""
    deepspeed = case.segments[number].engine.startswith("zero")
    words = case.arguments(number, str(folder / "logs"), str(folder / "images"))
    return read_config(training_parser("", known_strategies(ZERO if deepspeed else TORCH)), words)


def play(case: Case, ranks: WarmRanks, folder: Path) -> Played:
    """Run the jobs of a case in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if case.recipe.of_folder:
        draw_images(folder / "images", case)
    played = Played(case, folder, [])
    for number, segment in enumerate(case.segments):
        trace = folder / f"trace{number}"
        trace.mkdir()
        steps = [int(path.name.removeprefix("step_")) for path in whole_checkpoints(played)]
        argument = {
            "arguments": case.arguments(
                number, str(folder / "logs"), str(folder / "images"), segment.brief and bool(steps)
            ),
            "faults": [vars(fault) for fault in segment.faults], "trace": str(trace),
            "deepspeed": segment.engine.startswith("zero"),
        }  # fmt: skip
        ended = ranks.run(segment.ranks, BODY, argument, folder / f"job{number}", LIMIT)
        job = Job(segment, ended, max(steps, default=0))
        for rank in range(segment.ranks):
            path = trace / f"{rank}.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            job.trace.append([json.loads(line) for line in lines if line.endswith("}")])
        played.jobs.append(job)
        if any(ended.codes) and not job.killed:
            break
        for kind in segment.after if number + 1 < len(case.segments) else ():
            damage(played, kind, random.Random(case.recipe.seed))
    return played


def whole_checkpoints(played: Played) -> list[Path]:
    """Those that no damage of the case has touched, oldest first."""
    found = sorted((played.run / "checkpoints").glob("step_*"))
    return [path for path in found if not _mark(played, path).exists()]


def _mark(played: Played, checkpoint: Path) -> Path:
    """Says that this folder, not a later one of its name, was damaged."""
    return played.folder / f"damaged.{checkpoint.stat().st_ino}"


def damage(played: Played, kind: str, dice: random.Random) -> None:
    """Do to the run's files what a crash, a disk or a stranger might."""
    if kind == "tear_events":
        path = played.run / "events.jsonl"
        if path.exists():
            content = path.read_bytes()
            path.write_bytes(content[: len(content) - dice.randint(2, 20)])
        return
    found = whole_checkpoints(played)
    if len(found) < 2:  # the last one may not be lost
        return
    newest = found[-1]
    _mark(played, newest).touch()
    model = newest / "model.safetensors"
    if kind in ("flip_checkpoint", "empty_manifest"):
        content = bytearray(model.read_bytes())
        content[-5] ^= 64
        model.write_bytes(content)
    if kind == "empty_manifest":
        (newest / "manifest.json").write_text("{}\n")
    elif kind == "list_manifest":
        (newest / "manifest.json").write_text("[]\n")
    elif kind == "list_progress":
        (newest / "progress.json").write_text("[1]\n")
        _hash_progress(newest)
    elif kind == "pickle_tensors":
        torch.save({"weight": torch.zeros(3)}, newest / "optimizer.safetensors")
        _hash_progress(newest)


def _hash_progress(checkpoint: Path) -> None:
    """Write a manifest that says of each file what it is."""
    files = [path for path in checkpoint.iterdir() if path.name != "manifest.json"]
    manifest = {
        path.name: {
            "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()
        }
        for path in files
    }  # fmt: skip
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def draw_images(folder: Path, case: Case) -> None:
    """A folder of small images of two classes, as many as the recipe says, some of them bad."""
    dice = random.Random(case.recipe.seed)
    bad = dict(enumerate(case.recipe.bad_images))
    for part, count in (("train", case.recipe.samples), ("val", case.recipe.eval_images)):
        for number in range(count):
            path = folder / part / str(number % 2) / f"{number:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            width, height = case.recipe.sides or (8, 8)
            pixels = dice.randbytes(3 * width * height)
            Image.frombytes("RGB", (width, height), pixels).save(path)
            if part == "train" and number in bad:
                spoil(path, bad[number])


def spoil(path: Path, kind: str) -> None:
    """Make an image one that cannot be read."""
    assert kind in BAD_IMAGES
    content = path.read_bytes()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("this is no image\n")
    elif kind == "cut":
        path.write_bytes(content[: len(content) * 2 // 3])
    else:  # a header that promises 50,000 x 50,000 pixels
        header = b"IHDR" + struct.pack(">II", 50_000, 50_000) + content[24:29]
        check = struct.pack(">I", zlib.crc32(header))
        path.write_bytes(content[:12] + header + check + content[33:])


@contextlib.contextmanager
def played(case: Case, ranks: WarmRanks) -> Iterator[Played]:
    """A case that was played in a folder of its own, which goes in the end."""
    with tempfile.TemporaryDirectory(prefix="motley-fuzz-", dir=_memory_disk()) as name:
        yield play(case, ranks, Path(name) / "case")


def judged(case: Case, ranks: WarmRanks) -> list[str]:
    """What is wrong with a case, in words; empty if nothing is."""
    from fuzz.rules import broken_rules

    with played(case, ranks) as here:
        return broken_rules(here, ranks)


# Torch has one generator of random numbers for all threads: a model that one lane of the fuzzer
# makes would change the weights that another draws meanwhile.
ALONE = threading.Lock()


def _memory_disk() -> str | None:
    """Where a file costs no wait for a disk, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def unbroken(case: Case) -> Case | None:
    """The same without history, for a case whose jobs are all alike; None where they are not."""
    first = case.segments[0]
    if first.wire.startswith("local"):  # they meet where they save, and so where they stop
        ends = set(accumulate(map(len, case.recipe.sizes())))
        if every := case.recipe.save_every:
            ends = set(range(0, max(ends) + every, every))
        if any(segment.stop not in (None, *ends) for segment in case.segments):
            return None
    whole = replace(first, stop=None, faults=(), after=(), brief=False)
    for segment in case.segments:
        if replace(segment, stop=None, faults=(), after=(), brief=False) != whole:
            return None
        if any(fault.kind not in ("kill", "stranger") for fault in segment.faults):
            return None
    return Case(case.recipe, (replace(whole, stop=case.segments[-1].stop),))


def reference(played: Played, dtype: torch.dtype, noise: float = 0.0, draw: int = 0) -> Reference:
    """Train what the case should have come to; see Reference for the arguments.

    A caller holds :data:`ALONE`.
    """
    made: Reference | None = None
    for number, job in enumerate(played.jobs):
        config = played.config(number)
        if made is None:
            made = Reference(config, dtype, noise, draw)
        else:
            made.rewind(min(job.start, len(made.trained.steps)))
            made.configure(config)
        lines = (line for lines in job.trace for line in lines)
        made.train({line["overflowed"] for line in lines if "overflowed" in line})
    assert made is not None
    return made
