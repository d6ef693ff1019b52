"""setup/keep_training.sh in an allocation of Slurm's: a node dies."""

import subprocess
from collections.abc import Iterator

import pytest
from jobs import Jobs, wait_until
from lab_door import Door, lab_up
from long_runs import steps_done
from project import DDP, LIMIT_S, ROOT, venv
from slurm import start_slurm

from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

NAMES = ("slurm0", "slurm1", "slurm2")
PROFILE = "".join(
    f'[[host]]\nname = "{name}"\naddress = "10.97.97.{number}/24"\n'
    for number, name in enumerate(NAMES, 1)
)
WORDS = ("--epochs", 2, "--batch-size", 96, "--precision", "fp32", "--eval-samples", 60)
PACED = "tests/support/drivers/paced.py"
LINE = f"""
export PATH={venv()}/bin:$PATH MOTLEY_VENV={venv()} OMP_NUM_THREADS=1
export SLURM_CONF=$HOME/slurm/slurm.conf
cd {ROOT} && exec salloc --no-kill -N 3 bash setup/keep_training.sh srun --mpi=pmix -n 3 \\
  ./entry_cn.sh {PACED} {" ".join(map(str, WORDS))} --shares equal --logs ~/logs --run kept 2>&1
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Door]:
    with lab_up(PROFILE) as made:
        start_slurm(made, NAMES)
        yield made


@pytest.mark.turns("a host dies under keep_training.sh")
def test_it_goes_on_within_the_allocation(lab: Door, jobs: Jobs) -> None:
    one = jobs.train(1, DDP, "one", *WORDS)
    job: subprocess.Popen[str] = lab.start("exec", NAMES[0], "--", "bash", "-c", LINE)
    folder = lab.home(NAMES[0]) / "logs" / "kept"
    wait_until(lambda: steps_done(folder) > 8, 120)
    lab.do("kill", NAMES[2])
    output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert f"keep_training: {NAMES[2]} is gone (Slurm starts no process on {NAMES[2]}" in output
    assert "continues with 2 of 3 hosts, about 0.67 of the speed" in output
    assert "finished, after 1 restart" in output, output
    steps = RunFolder(folder).read_steps()[0]
    assert [step["step"] for step in steps] == list(range(len(one.losses)))
    assert [step["loss"] for step in steps] == pytest.approx(one.losses, rel=2e-6)
