"""Who writes which step records, of few ranks and of many."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.engines.protocol import StepResult
from motley.engines.step_timer import Laps
from motley.plan.length import TrainState
from motley.plan.plan import Plan
from motley.records.costs import lead
from motley.records.run_folder import RunFolder
from motley.tasks.builtin.image import ImageTask
from motley.train.recorder import Recorder

LAUNCHED = (0, 2, 3, 5)  # the others were left out
READY_S = (0.2, 0.5, 0.1, 0.3)  # of each in the first step
PLAN = Plan(10, (4.0, 1.0, 3.0, 2.0), (9,) * 4, EXACT)


def write(
    folder: RunFolder, rank: int, most_writers: int, done: int = 0, has_gpus: bool = True
) -> None:
    """Two steps of a rank; with GPUs, only the first one's times are known to all in the end."""
    run: Any = SimpleNamespace(
        folder=folder, event=lambda *_, **__: None, samples=0, trains_since=0.0
    )
    workers = [SimpleNamespace(rank=launched) for launched in LAUNCHED]
    device = torch.device("cpu")
    group: Any = SimpleNamespace(rank=rank, workers=workers, device=device, has_gpus=has_gpus)
    own = READY_S[rank]
    laps = Laps([("", 0.0), ("data", 0.02), ("compute", own), ("sync", 0.6), ("opt", 0.7)])
    recorder = Recorder(
        run, ImageTask(), group, Config(), tells_sync=True, done=done, total=done + 2,
        compiles=False, most_writers=most_writers,
    )  # fmt: skip
    with recorder:
        for step, ready_s in ((done, (0.0,) * 4), (done + 1, READY_S)):
            result = StepResult(20.0, 1.0, False, 1.0, ready_s, laps=laps)
            recorder.step(TrainState(step, 0, 10 * step), 1e-3, PLAN, result)
    assert recorder.progress.step == done + 1, "every rank's GPU log tells its step"


def test_few_ranks_write_each_their_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for rank in range(4):
        write(folder, rank, most_writers=4)
    found = folder.read_steps()
    assert [*found] == [*LAUNCHED]
    waited = [lines[0]["t_wait"] for lines in found.values()]
    assert waited == pytest.approx([0.3, 0.0, 0.4, 0.2])
    assert all(line["others_ready"] is None for lines in found.values() for line in lines)


def test_without_gpus_a_step_is_written_as_soon_as_it_is_taken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write(folder, 0, most_writers=4, has_gpus=False)
    assert [line["t_wait"] for line in folder.read_steps()[0]] == pytest.approx([0.0, 0.3])


def test_of_many_the_first_alone_writes_with_three_of_the_others(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for rank in range(4):
        write(folder, rank, most_writers=3)
    assert not list(tmp_path.glob("steps.rank[1-9]*"))
    first, second = folder.read_steps()[0]
    assert first["others_ready"] == {
        "least": {"rank": 3, "ready_s": 0.1, "n_local": 3},
        "middle": {"rank": 5, "ready_s": 0.3, "n_local": 2},
        "largest": {"rank": 2, "ready_s": 0.5, "n_local": 1},
    }
    assert first["t_wait"] == pytest.approx(0.3) and first["n_local"] == 4
    assert second["others_ready"] is None, "the run has ended before they could tell"


def test_a_run_goes_on_with_more_ranks_and_with_fewer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for done, most_writers in ((0, 4), (1, 3), (2, 4)):  # the last step is taken again
        for rank in range(4):
            write(folder, rank, most_writers, done)
    found = folder.read_steps()
    assert [line["step"] for line in lead(found)] == [0, 1, 2, 3]
    assert [line["step"] for line in found[5]] == [0, 2, 3]
    assert [line["others_ready"] is None for line in found[0]] == [True, False, True, True]
