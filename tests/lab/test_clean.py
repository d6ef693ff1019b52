"""What ends leftover training processes ends those, and nothing else."""

from collections.abc import Iterator

import pytest
from jobs import Done, wait_until
from lab_door import Door, lab_up
from project import ROOT, venv

pytestmark = pytest.mark.mpi

SCRIPT = ROOT / "setup" / "clean_cn.sh"
LINGER = "tests/support/drivers/linger.py"


HOSTS = "[defaults]\nshell = 'tcsh'\n" + "".join(
    f"[[host]]\nname = 'c{number}'\naddress = '10.97.91.{number + 1}/24'\n" for number in range(2)
)
START = f"""
cd {ROOT}
PATH={venv()}/bin:$PATH exec mpirun -np 2 --map-by node --hostfile ~/hosts.txt -x MOTLEY_VENV \\
  ./entry_cn.sh {LINGER} $1
"""


@pytest.fixture
def lab() -> Iterator[Door]:
    """Two hosts."""
    with lab_up(HOSTS, keys=True) as made:
        yield made


def clean(lab: Door, *words: object) -> Done:
    """setup/clean_cn.sh on c0."""
    return lab.run("exec", "c0", "--", "bash", SCRIPT, "--hostfile", "hosts.txt", *words)


def lingering(lab: Door, host: str) -> dict[str, int]:
    """Pids of the ranks on a host, by the mark in their command line."""
    lines = lab.do("exec", "--root", host, "--", "ps", "-eww", "-o", "pid=,args=").splitlines()
    ranks = [line.split() for line in lines if "-m motley.launch" in line and LINGER in line]
    return {words[-1]: int(words[0]) for words in ranks}


def launchers(lab: Door, host: str, mark: str) -> list[int]:
    """Pids of the mpirun or the daemons that have ``mark`` in their command line."""
    lines = lab.on(host, "ps", "-eww", "-o", "pid=,comm=,args=").splitlines()
    found = [line.split() for line in lines if mark in line]
    return [int(words[0]) for words in found if words[1] in ("prterun", "prted")]


def test_leftovers_on_two_hosts_are_ended_and_nothing_else(lab: Door) -> None:
    jobs = [lab.start("exec", "c0", "--", "bash", "-c", START, "start", m) for m in ("old", "new")]
    alike = f"cd {ROOT} && exec ./entry_cn.sh {LINGER} other"
    jobs.append(lab.start("exec", "--root", "c0", "--", "sh", "-c", alike))
    try:
        wait_until(lambda: set(lingering(lab, "c0")) == {"old", "new", "other"}, 20)
        wait_until(lambda: set(lingering(lab, "c1")) == {"old", "new"}, 20)
        done = clean(lab)
        assert done.code == 0 and "nothing is left over" in done.output
        assert done.output.count("running") == done.output.count("\nc")

        # The old job's mpirun and daemons are killed, as by the kernel's out-of-memory killer.
        (mpirun,) = launchers(lab, "c0", f"{LINGER} old")
        lab.on("c1", "kill", "-KILL", *launchers(lab, "c1", f"prterun-c0-{mpirun}@"))
        lab.run("exec", "c0", "--", "kill", "-KILL", mpirun)
        lab.on("c1", "kill", "-STOP", lingering(lab, "c1")["old"])  # and SIGTERM is no help
        before = {host: lingering(lab, host) for host in ("c0", "c1")}
        assert "old" in before["c0"] and "old" in before["c1"]

        assert clean(lab).code == 1  # no terminal, no yes
        done = clean(lab, "--dry-run")
        old = f"c0 {before['c0']['old']}, c1 {before['c1']['old']}"
        assert done.code == 0 and f"would end 2 processes: {old}\n" in done.output
        assert {host: lingering(lab, host) for host in before} == before

        command = f"bash {SCRIPT} --hostfile hosts.txt"  # on a terminal, where somebody says yes
        said = lab.do("exec", "c0", "--", "script", "-qec", command, "/dev/null", stdin="y\n")
        assert f"c0: ended {before['c0']['old']}" in said, said
        assert f"c1: killed {before['c1']['old']}" in said
        assert set(lingering(lab, "c0")) == {"new", "other"}
        assert set(lingering(lab, "c1")) == {"new"}

        assert clean(lab, "--running", "--yes").code == 0
        assert set(lingering(lab, "c0")) == {"other"} and not lingering(lab, "c1")
        assert clean(lab).output == "nothing is left over\n"
    finally:
        for job in jobs:
            job.kill()
