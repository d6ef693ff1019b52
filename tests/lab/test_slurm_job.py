"""setup/slurm_job.sh: an allocation ends in the middle of a training, and the next goes on; each
cell of a matrix is a job."""

from collections.abc import Iterator

import pytest
from jobs import Jobs, wait_until
from lab_door import Door, lab_up
from long_runs import steps_done
from project import DDP, venv
from slurm import start_slurm

from motley.records.run_folder import RunFolder
from motley.sweep.results import BaselineFolder
from motley.sweep.table import read_rows

pytestmark = pytest.mark.mpi

NAMES = ("batch0", "batch1")
PROFILE = "".join(
    f'[[host]]\nname = "{name}"\naddress = "10.97.90.{number}/24"\n'
    for number, name in enumerate(NAMES, 1)
)
WORDS = ("--epochs", 2, "--batch-size", 96, "--precision", "fp32", "--eval-samples", 60)
PACED = "tests/support/drivers/paced.py"


@pytest.fixture(scope="module")
def lab() -> Iterator[Door]:
    with lab_up(PROFILE) as made:
        start_slurm(made, NAMES)
        made.give_repository(NAMES[0])
        yield made


def on_slurm(lab: Door, line: str) -> str:
    """A line in the repository on the controller, where Slurm is known."""
    own = f"export SLURM_CONF=$HOME/slurm/slurm.conf MOTLEY_VENV={venv()} OMP_NUM_THREADS=1"
    return lab.on(NAMES[0], "bash", "-c", f"{own}; cd motley; {line} 2>&1")


def test_a_job_that_ends_before_its_training_goes_on_by_itself(lab: Door, jobs: Jobs) -> None:
    assert "all (default)  up" in on_slurm(lab, "bash setup/slurm_job.sh")
    one = jobs.train(1, DDP, "one", *WORDS)
    line = f"./entry_cn.sh {PACED} {' '.join(map(str, WORDS))} --shares equal --run kept"
    job = "bash setup/slurm_job.sh --nodes 2 --time 10 --requeue --submit"
    said = on_slurm(lab, f"{job} {line}")
    number = said.split("job ")[1].split(";")[0]
    home = lab.home(NAMES[0]) / "motley" / "logs"
    wait_until(lambda: steps_done(home / "kept") > 8, 120)
    # What Slurm does some minutes before the end of an allocation.
    on_slurm(lab, f"scancel --signal=USR2 {number}")
    wait_until(lambda: RunFolder(home / "kept").read_run().get("status") == "finished", 180)
    steps = RunFolder(home / "kept").read_steps()[0]
    assert [step["step"] for step in steps] == list(range(len(one.losses)))
    assert [step["loss"] for step in steps] == pytest.approx(one.losses, rel=2e-6)
    output = (home / f"kept.{number}.out").read_text()
    assert "paused as asked (SIGUSR2)" in output and "goes on with the next allocation" in output
    wait_until(lambda: number not in on_slurm(lab, "squeue -h -o %i"), 30)


MATRIX = """
repeats = 1
steps = 6
[[cell]]
name = "good"
options = "--micro-batch 8"
batch = 32
[[cell]]
name = "killed"
script = "tests/support/drivers/failing.py"
options = "--fail killed"
batch = 32
"""


def test_each_cell_of_a_matrix_is_a_task_and_the_last_one_writes_the_table(lab: Door) -> None:
    place = lab.home(NAMES[0]) / "motley"
    lab.on(NAMES[0], "sh", "-c", "cat >motley/some.toml", stdin=MATRIX)
    line = "torch_dist/baseline_measure.py --matrix some.toml"
    said = on_slurm(lab, f"bash setup/slurm_job.sh --array --ranks 2 --submit {line}")
    assert "some: 3 tasks on 1 node of all with 2 ranks" in said, said
    folder = BaselineFolder(place / "baselines" / "some")
    cells = folder.matrix_cells()
    wait_until(lambda: not on_slurm(lab, "squeue -h -o %i"), 240)
    rows = {row.name: row for row in read_rows(folder)}
    logs = "".join(path.read_text() for path in sorted((place / "logs").glob("some.*.out")))
    ended = {name: row.outcome for name, row in rows.items()}
    assert ended == {"reference": "done", "good": "done", "killed": "killed"}, logs
    assert {row.hosts for row in rows.values() if row.hosts} <= set(NAMES)
    assert rows["good"].loss_difference == pytest.approx(0, abs=1e-5)
    table = (folder.path / "results.md").read_text()
    assert all(f"| {cell.name} |" in table for cell in cells) and "**killed**: killed" in table
    again = on_slurm(lab, f"bash setup/slurm_job.sh --array --ranks 2 {line} || true")
    assert "every cell of baselines/some is measured" in again
    (folder.path / "results.md").unlink()
    on_slurm(lab, f"PYTHONPATH=src {venv()}/bin/python {line} --nodes 1x2 || true")
    assert (folder.path / "results.md").read_text() == table


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--nodes 3", "--nodes 3: the partition all has only 2 nodes"),
        ("--gpus 1", "--gpus 1: a node of the partition all has no GPUs"),
        ("--ranks 99", "--ranks 99: a node of the partition all has 2 cores"),
        ("--partition al", "--partition al does not exist (nearest: all)"),
        ("--time tomorrow", "'tomorrow' is not a time that Slurm accepts"),
        ("--time 1 --before 90", "--before 90: the whole job takes 60 s"),
        ("--container no.sif", "--container no.sif is not a file"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused_at_once(
    lab: Door, options: str, says: str
) -> None:
    words = f"bash setup/slurm_job.sh {options} --submit ./entry_cn.sh --epochs 1; echo $?"
    said = on_slurm(lab, words)
    assert says in said and said.endswith("\n2"), said
