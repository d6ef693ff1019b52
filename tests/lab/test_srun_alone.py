"""What srun without PMIx starts, where there is no program of Slurm's, as in a container: hosts
find the first of the allocation by its name, and train."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Done, Trained
from lab_door import Door, new_door
from project import LIMIT_S, ROOT, venv

pytestmark = pytest.mark.mpi

NAMES = ("bare01", "bare02")
PROFILE = "".join(
    f'[[host]]\nname = "{name}"\naddress = "10.97.91.{number}/24"\n'
    for number, name in enumerate(NAMES, 1)
)

# As root of the host, in a mount namespace of its own: each program of Slurm's and MPI's launchers
# is false. Then as the lab's user.
START = """
for name in srun scontrol sinfo squeue sbatch salloc mpirun ompi_info; do
  for folder in /usr/bin {venv}/bin; do
    [ ! -e $folder/$name ] || mount --bind /bin/false $folder/$name
  done
done
! srun && ! scontrol
cd {root} && exec setpriv --reuid={user} --regid={user} --clear-groups env -i \\
  HOME=/home/{home} PATH=/usr/bin:/bin OMP_NUM_THREADS=1 MOTLEY_VENV={venv} \\
  SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3 SLURM_PROCID={rank} SLURM_LOCALID={local} \\
  SLURM_STEP_TASKS_PER_NODE='2,1' SLURM_NODELIST='bare[01-02]' \\
  ./entry_cn.sh --logs /home/{home}/logs --run bare --max-steps 12 --hosts all
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Two hosts that share a home, and cannot log in to each other."""
    profile = tmp_path_factory.mktemp("lab") / "bare.toml"
    profile.write_text(PROFILE)
    with new_door() as made:
        made.do("up", "--profile", profile)
        yield made


def test_hosts_of_an_allocation_train_without_slurm_or_mpi(lab: Door) -> None:
    home = lab.home(NAMES[0])
    user = home.stat().st_uid
    jobs = [
        lab.start(
            "exec", host, "--root", "--", "unshare", "--mount", "bash", "-euc",
            START.format(
                venv=venv(), root=ROOT, user=user, home=home.name, rank=rank, local=local
            ),
        )
        for rank, (host, local) in enumerate(((NAMES[0], 0), (NAMES[0], 1), (NAMES[1], 0)))
    ]  # fmt: skip
    said = []
    try:
        said = [job.communicate(timeout=LIMIT_S)[0] for job in jobs]
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                job.kill()
    assert [job.returncode for job in jobs] == [0, 0, 0], said
    trained = Trained(Path(home, "logs", "bare"), Done(0, said[0], 0.0))
    assert trained.run["status"] == "finished" and len(trained.losses) == 12
    assert [rank["host"] for rank in trained.run["ranks"]] == [NAMES[0], NAMES[0], NAMES[1]]
    assert trained.steps(2)[-1]["loss"] == trained.losses[-1]
