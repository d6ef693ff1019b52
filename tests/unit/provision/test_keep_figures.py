"""What the return of a host, or of a rank that it has lost, is thought to save."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from motley.provision.keep_returns import Figures


class Run:
    """Records of a run that has just been launched."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at, self.step = folder, time.time(), 0

    def train(self, hosts: Sequence[str], step_s: float, steps: int = 100) -> None:
        """So many steps of ranks on these hosts, with equal shares."""
        content = {
            "ranks": [{"host": host} for host in hosts], "last_step": 1000, "config": {},
            "plan": {"counts": [120 // len(hosts)] * len(hosts), "global_batch": 120},
        }  # fmt: skip
        (self.folder / "run.json").write_text(json.dumps(content))
        with (self.folder / "steps.rank0.jsonl").open("a") as file:
            for _ in range(steps):
                self.at += step_s
                file.write(json.dumps({"step": self.step, "time": self.at}) + "\n")
                self.step += 1


def launched(folder: Path) -> tuple[Figures, Run]:
    figures = Figures(folder)
    figures.launched()
    return figures, Run(folder)


def test_a_restart_repeats_the_steps_since_the_newest_checkpoint(tmp_path: Path) -> None:
    figures, run = launched(tmp_path)
    assert figures.resume_point() == "from the start"
    run.train("a", 0.1, steps=24)
    assert figures.resume_point() == "from the start; steps 1 to 24 are repeated"
    for step, where in ((15, "from step 15; steps 16 to 24 are repeated"), (24, "from step 24")):
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        assert figures.resume_point() == where


@pytest.mark.parametrize(
    ("left", "back"), [(("a", "b"), "b"), (("b", "b"), "a")], ids=["a rank", "a host"]
)
def test_it_saves_what_it_did_before(tmp_path: Path, left: tuple[str, ...], back: str) -> None:
    figures, run = launched(tmp_path)
    run.train(("a", "b", "b"), 1.0)
    figures.look()
    figures.look()
    run.train(left, 1.5, 400)
    found = figures.take_back({back: []})
    assert found and (found.step_s, found.with_s) == pytest.approx((1.5, 1.0), rel=1e-3)
    assert found.steps == 500 and found.worth_it


def test_a_host_that_is_not_known_is_thought_to_be_like_the_others(tmp_path: Path) -> None:
    figures, run = launched(tmp_path)
    run.train(("a", "b"), 1.5)
    figures.look()
    found = figures.take_back({"c": []})
    assert found and found.with_s == pytest.approx(1.0, rel=1e-3)


def test_a_host_that_has_lost_nothing_saves_nothing(tmp_path: Path) -> None:
    figures, run = launched(tmp_path)
    run.train(("a", "b", "b"), 1.0)
    figures.look()
    found = figures.take_back({"b": []})
    assert found and not found.worth_it and found.saves_s == pytest.approx(0, abs=1e-3)
