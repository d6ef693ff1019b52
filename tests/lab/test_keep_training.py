"""setup/keep_training.sh: a host that dies costs its speed, and no step."""

import subprocess
import time
from collections.abc import Iterator

import pytest
from jobs import Jobs, wait_until
from lab_door import Door, new_door
from long_runs import steps_done
from project import DDP, ROOT, venv

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
  -x OMP_NUM_THREADS ./entry_cn.sh {words} --shares 3,2,1 --logs ~/logs --run kept 2>&1
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    profile = tmp_path_factory.mktemp("lab") / "kept.toml"
    profile.write_text(PROFILE)
    with new_door() as made:
        made.do("up", "--profile", profile)
        made.give_keys()
        yield made


def test_it_goes_on_without_a_host_that_dies_and_loses_no_step(lab: Door, jobs: Jobs) -> None:
    one = jobs.train(1, DDP, "one", *WORDS[1:])
    text = LINE.format(venv=venv(), root=ROOT, words=" ".join(map(str, WORDS)))
    job: subprocess.Popen[str] = lab.start("exec", NAMES[0], "--", "bash", "-c", text)
    folder = lab.home(NAMES[0]) / "logs" / "kept"
    wait_until(lambda: steps_done(folder) > 20, 120)
    lab.do("kill", NAMES[2])
    killed = time.time()
    output, _ = job.communicate(timeout=180)
    assert job.returncode == 0, output
    assert f"rank 2 on {NAMES[2]}" in output and "motley: saved as of step" in output
    assert f"keep_training: {NAMES[2]} is gone" in output
    assert "on with 2 of 3 hosts, about 0.83 of the speed" in output
    assert output.rstrip().endswith("finished, after 1 restarts")
    steps = RunFolder(folder).read_steps()[0]
    assert [step["step"] for step in steps] == list(range(len(one.losses)))
    assert [step["loss"] for step in steps] == pytest.approx(one.losses, rel=2e-6)
    next_step = min(step["time"] for step in steps if step["time"] > killed + 5)
    assert next_step - killed < 60  # 15 s until it is silent, and a launch
    lab.do("boot", NAMES[2])
