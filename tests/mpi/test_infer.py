"""Inference on several ranks: one dies, some go on, and what is merged is the same."""

import csv
import os
import signal
import time
from pathlib import Path

import pytest
from jobs import Jobs, wait_until
from PIL import Image
from project import DDP

from motley.infer.infer_vit import MERGED

pytestmark = pytest.mark.mpi


INFER = "torch_dist/infer_vit.py"


@pytest.fixture(scope="module")
def trained(module_jobs: Jobs) -> Path:
    """A run's folder."""
    return module_jobs.train(1, DDP, "run", "--epochs", 1).folder


@pytest.fixture(scope="module")
def alone(trained: Path, module_jobs: Jobs) -> bytes:
    """What one rank says of all training images."""
    out = module_jobs.logs / "alone"
    done = module_jobs.fork(1, INFER, "--checkpoint", trained, "--split", "train", "--out", out)
    assert done.code == 0 and "1437 images, top-1" in done.output, done.output
    return (out / MERGED).read_bytes()


def test_the_others_finish_what_a_killed_rank_leaves(
    jobs: Jobs, trained: Path, alone: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job = jobs.start(3, INFER, "--checkpoint", trained, "--split", "train", "--out", out,
                     "--shard", 3)  # fmt: skip
    lease = out / "rank.1.lease"
    wait_until(lambda: lease.exists() and bool(lease.read_text()), 60)
    os.kill(int(lease.read_text().rpartition(".")[2]), signal.SIGKILL)
    done = jobs.wait(job)
    assert done.code == 0, done.output
    assert "rank 1" in done.output and "its worker was killed by SIGKILL" in done.output
    assert (out / MERGED).read_bytes() == alone
    assert not list(out.glob("*.lease")) or list(out.glob("*.lease")) == [lease]


def test_a_rerun_computes_what_is_missing_alone(
    jobs: Jobs, trained: Path, alone: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = (INFER, "--checkpoint", trained, "--split", "train", "--out", out, "--shard", 1)

    def shards() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in out.glob("shard.*.csv")}

    job = jobs.start(2, *words)
    wait_until(lambda: len(shards()) >= 20, 60)
    job.kill()
    jobs.wait(job)
    time.sleep(1)
    before = shards()
    assert 20 <= len(before) < 1437 and not (out / MERGED).exists()
    done = jobs.fork(3, *words)
    assert done.code == 0, done.output
    after = shards()
    assert {name: after[name] for name in before} == before and len(after) == 1437
    assert (out / MERGED).read_bytes() == alone
    again = jobs.fork(2, *words)
    assert again.code == 0 and "1437 images, top-1" in again.output
    assert shards() == after


def test_images_of_ones_own_have_no_label(jobs: Jobs, trained: Path, tmp_path: Path) -> None:
    photos, out = tmp_path / "my photos", tmp_path / "out"
    for name, size, colour in (("a, b.png", (30, 20), "red"), ("more/c.JPG", (8, 8), "white")):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, colour).save(photos / name)
    (photos / "notes.txt").write_text("no image")
    words = (INFER, "--checkpoint", trained, "--out", out, "--images")
    done = jobs.fork(2, *words, photos)
    assert done.code == 0 and "2 images" in done.output and "top-1" not in done.output
    with (out / MERGED).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["image"], row["label"]) for row in rows] == [("a, b.png", ""), ("more/c.JPG", "")]
    assert all(0 <= int(row["predicted"]) < 10 for row in rows)
    empty = tmp_path / "empty"
    empty.mkdir()
    wrong = jobs.fork(1, *words, empty)
    assert wrong.code == 2 and "has no image" in wrong.output
    (empty / "torn.png").write_bytes((photos / "a, b.png").read_bytes()[:60])
    torn = jobs.fork(1, *words, empty, "--out", tmp_path / "torn")
    assert torn.code == 2 and "torn.png cannot be read" in torn.output


def test_what_is_wrong_is_said(jobs: Jobs, trained: Path, tmp_path: Path) -> None:
    nowhere = jobs.fork(1, INFER, "--checkpoint", tmp_path)
    assert nowhere.code == 2 and "has no checkpoint" in nowhere.output
    out = tmp_path / "out"
    assert jobs.fork(1, INFER, "--checkpoint", trained, "--out", out).code == 0
    other = jobs.fork(1, INFER, "--checkpoint", trained, "--out", out, "--split", "train")
    assert other.code == 2 and "split val (now: train)" in other.output
