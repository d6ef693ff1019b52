"""What setup/test_mpi.sh starts ends with it."""

import secrets
import subprocess
import time

import pytest
from jobs import processes_of, wait_until
from project import venv

from motley.provision.test_mpi import end_mpirun

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("after_s", [0.1, 2.0])
def test_an_mpirun_that_is_stopped_ends(after_s: float) -> None:
    mark = f"60.{secrets.randbelow(10**9)}"
    job = subprocess.Popen(
        [venv() / "bin/mpirun", "-np", "2", "sleep", mark], start_new_session=True, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    time.sleep(after_s)
    end_mpirun(job)
    wait_until(lambda: not processes_of(mark), 2)
