"""setup/keep_training.sh: a host that dies costs its speed, and no step."""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs, wait_until
from lab_door import Door, new_door
from long_runs import rank_process, steps_done
from project import DDP, LIMIT_S, ROOT, venv

from motley.records.costs import lead
from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

NAMES = ("kept0", "kept1", "kept2")
PROFILE = "".join(
    f'[[host]]\nname = "{name}"\naddress = "10.97.99.{number}/24"\n'
    for number, name in enumerate(NAMES, 1)
)
WORDS = (DDP, "--epochs", 6, "--batch-size", 96, "--precision", "fp32", "--eval-samples", 60)
LINE = """
export PATH={venv}/bin:$PATH MOTLEY_VENV={venv} OMP_NUM_THREADS=1
cd {root} && bash setup/keep_training.sh mpirun -np 3 --hostfile ~/hosts.txt -x MOTLEY_VENV \\
  -x OMP_NUM_THREADS ./entry_cn.sh {words} --shares 3,2,1 --logs ~/logs --run {name} 2>&1
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    profile = tmp_path_factory.mktemp("lab") / "kept.toml"
    profile.write_text(PROFILE)
    with new_door() as made:
        made.do("up", "--profile", profile)
        made.give_keys()
        yield made


@pytest.fixture(scope="module")
def one(module_jobs: Jobs) -> list[float]:
    """The losses of one rank."""
    return module_jobs.train(1, DDP, "one", *WORDS[1:]).losses


def begin(lab: Door, name: str) -> tuple[subprocess.Popen[str], Path]:
    """A run that has come past its twentieth step, and its folder."""
    while (lab.home(NAMES[0]) / "logs" / name).exists():  # it is tried again
        name += "-again"
    text = LINE.format(venv=venv(), root=ROOT, words=" ".join(map(str, WORDS)), name=name)
    job: subprocess.Popen[str] = lab.start("exec", NAMES[0], "--", "bash", "-c", text)
    folder = lab.home(NAMES[0]) / "logs" / name
    wait_until(lambda: steps_done(folder) > 20, 120)
    return job, folder


def goes_on_as(one: list[float], folder: Path) -> list[dict[str, Any]]:
    """Each step is there once, with the loss of one rank alone; the steps of a rank that lives."""
    steps = list(lead(RunFolder(folder).read_steps()))
    assert [step["step"] for step in steps] == list(range(len(one)))
    assert [step["loss"] for step in steps] == pytest.approx(one, rel=2e-6)
    return steps


def test_rank_0_dies_and_the_others_go_on_in_the_same_processes(
    lab: Door, one: list[float]
) -> None:
    job, folder = begin(lab, "without-rank-0")
    os.kill(rank_process(Path(folder.name), 0), signal.SIGKILL)
    output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert f"rank 0 on {NAMES[0]}" in output and "2 of 3 ranks continue" in output
    steps = goes_on_as(one, folder)
    times = [step["time"] for step in steps]
    assert max(later - time for time, later in itertools.pairwise(times)) < 6, output
    run = RunFolder(folder).read_run()
    assert run["status"] == "finished" and [r["host"] for r in run["ranks"]] == list(NAMES[1:])


@pytest.mark.turns("a host dies under keep_training.sh")
def test_it_goes_on_without_a_host_that_dies_and_loses_no_step(lab: Door, one: list[float]) -> None:
    job, folder = begin(lab, "kept")
    lab.do("kill", NAMES[2])
    killed = time.time()
    output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert f"rank 2 on {NAMES[2]}" in output and "motley: saved as of step" in output
    assert f"keep_training: {NAMES[2]} is gone" in output
    assert "continues with 2 of 3 hosts, about 0.83 of the speed" in output
    assert output.rstrip().endswith("finished, after 1 restart")
    assert "are repeated" not in output
    steps = goes_on_as(one, folder)
    next_step = min(step["time"] for step in steps if step["time"] > killed + 5)
    assert next_step - killed < 60  # 15 s until it is silent, and a launch
    lab.do("boot", NAMES[2])
