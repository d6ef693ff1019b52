"""setup/leave_cn.sh and join_cn.sh: a host leaves after its step and comes back, and no step is
lost."""

import re
import subprocess
import time
from collections.abc import Iterator

import pytest
from jobs import Done, Jobs, wait_until
from lab_door import Door, lab_up
from long_runs import steps_done
from project import DDP, LIMIT_S, ROOT, venv

from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

NAMES = ("leave0", "leave1", "leave2")
PROFILE = "".join(
    f'[[host]]\nname = "{name}"\naddress = "10.97.98.{number}/24"\n'
    for number, name in enumerate(NAMES, 1)
)
WORDS = ("--epochs", 12, "--batch-size", 96, "--precision", "fp32", "--eval-samples", 60)
LINE = f"""
export PATH={venv()}/bin:$PATH MOTLEY_VENV={venv()} OMP_NUM_THREADS=1
cd {ROOT} && bash setup/keep_training.sh mpirun -np 3 --hostfile ~/hosts.txt -x MOTLEY_VENV \\
  -x OMP_NUM_THREADS ./entry_cn.sh tests/support/drivers/paced.py {" ".join(map(str, WORDS))} \\
  --shares equal --logs ~/logs --run kept 2>&1
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Door]:
    with lab_up(PROFILE, keys=True) as made:
        yield made


def script(lab: Door, name: str, *words: object) -> Done:
    """One of setup's scripts, on the second host, which reaches itself alone."""
    path = ROOT / "setup" / f"{name}.sh"
    return lab.run("exec", NAMES[1], "--", "bash", path, "--hostfile", "hosts.txt", *words)


def test_who_cannot_leave_is_refused(lab: Door) -> None:
    none = script(lab, "leave_cn", NAMES[1])
    assert none.code == 2 and "you have no training on leave1" in none.output
    assert script(lab, "leave_cn", NAMES[1], "--for", "0h").code == 2
    assert "takes part already" in script(lab, "join_cn", NAMES[1]).output
    alone = f"cd {ROOT} && exec ./entry_cn.sh tests/support/drivers/linger.py alone"
    job = lab.start("exec", NAMES[1], "--", "bash", "-c", f"export MOTLEY_VENV={venv()}; {alone}")
    try:
        time.sleep(5)
        last = script(lab, "leave_cn", NAMES[1])
        assert (
            last.code == 2
            and "leave1 cannot leave, because the run would have no host left" in last.output
        )
        assert job.poll() is None
    finally:
        lab.run("exec", NAMES[1], "--", "pkill", "-f", "linger.py alone")
        job.wait(20)


def test_a_host_leaves_and_is_taken_back_and_no_step_is_lost(lab: Door, jobs: Jobs) -> None:
    one = jobs.train(1, DDP, "one", *WORDS)
    job: subprocess.Popen[str] = lab.start("exec", NAMES[0], "--", "bash", "-c", LINE)
    folder = lab.home(NAMES[0]) / "logs" / "kept"
    wait_until(lambda: steps_done(folder) > 15, 120)
    assert "leave9 is not in hosts.txt (nearest: " in script(lab, "leave_cn", "leave9").output
    left = script(lab, "leave_cn", NAMES[1], "--for", "10s")
    assert left.code == 0, left.output
    seconds = re.search(r"leave1 has left, until .*: 1 rank ended in ([\d.]+) s", left.output)
    assert seconds and float(seconds[1]) < 5, left.output
    begun = steps_done(folder)
    output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert f"motley: saved as of step {begun}\n" in output, output
    assert f"motley: {NAMES[1]} leaves as asked (leave_cn.sh, until" in output
    assert f"keep_training: {NAMES[1]} is away, until" in output
    assert "continues with 2 of 3 hosts, about 0.67 of the speed" in output
    assert f"keep_training: {NAMES[1]} will rejoin after this step: that saves" in output
    assert f"keep_training: {NAMES[1]} is back; continues with 3 of 3 hosts" in output
    assert output.rstrip().endswith("finished, after 2 restarts")
    steps = RunFolder(folder).read_steps()
    assert [step["step"] for step in steps[0]] == list(range(len(one.losses)))
    assert [step["loss"] for step in steps[0]] == pytest.approx(one.losses, rel=2e-6)
    assert len(steps[2]) < len(steps[0])  # while there were two
