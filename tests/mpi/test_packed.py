"""Training from a packed folder: the folder's own run, on any ranks; what is not alike is named."""

from pathlib import Path

import pytest
from jobs import Jobs
from pictures import picture_folder
from project import DDP

from motley.data.packed_file import Keep, list_folder, pack

pytestmark = pytest.mark.mpi

STEPS = (
    "--model",
    "vit_digits",
    "--img-size",
    16,
    "--batch-size",
    8,
    "--epochs",
    3,
    "--precision",
    "fp32",
    "--warmup-epochs",
    0,
    "--aa",
    "rand-m9-mstd0.5",
    "--shares",
    "equal",
)  # which rounds always alike: else what is fastest decides how large micro-batches are

# Whose data is another on each rank, as far as it can tell.
OTHER_TASK = """
import os
from dataclasses import dataclass
from motley.tasks.builtin.image import ImageTask

@dataclass(frozen=True)
class Other(ImageTask):
    def identity(self):
        return {"images_sha256": str(os.getpid())}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return picture_folder(tmp_path / "pictures")


def test_packed_images_are_learnt_as_the_folder_is_on_any_ranks(jobs: Jobs, root: Path) -> None:
    path = root.with_suffix(".packed")
    pack(list_folder(root), Keep(), path, 1, lambda _: None)
    packed = ("--dataset", "packed", "--data-dir", path, *STEPS)
    one = jobs.train(1, DDP, "one", *packed)
    assert len(one.losses) == 9
    folder = jobs.train(1, DDP, "folder", "--dataset", "folder", "--data-dir", root, *STEPS)
    assert folder.losses == one.losses
    two = jobs.train(2, DDP, "two", *packed, "--shares", "5,3")
    assert two.losses == pytest.approx(one.losses, rel=2e-6)
    assert two.epochs[-1]["samples"] == 8

    (root / "train" / "cat" / "3.png").unlink()
    pack(list_folder(root), Keep(), path, 1, lambda _: None)
    again = jobs.fork(1, DDP, "--logs", jobs.logs, "--run", "one", "--resume", "auto", *packed)
    assert again.code != 0 and "be continued with images sha256" in again.output


def test_ranks_with_other_data_than_the_first_are_named(jobs: Jobs, tmp_path: Path) -> None:
    task = tmp_path / "other.py"
    task.write_text(OTHER_TASK)
    done = jobs.fork(2, "torch_dist/train.py", "--logs", jobs.logs, "--task", task)
    assert done.code != 0
    assert "has other data than rank 0 on" in done.output and "images_sha256 differ" in done.output
