"""Labs whose hosts or networks are easily taken for others, each as a lab in a box."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_door import Door, lab_up
from project import ROOT, venv

pytestmark = pytest.mark.mpi

PROFILES = Path(__file__).parent / "lab"
SAY = """
from motley.launch.world import run

def main(world):
    print(f"{world.host} is at {world.network.address}", flush=True)

run(main)
"""


@pytest.fixture(scope="module", params=["dotted", "plain"])
def lab(request: pytest.FixtureRequest) -> Iterator[tuple[str, Door]]:
    with lab_up(PROFILES / f"{request.param}.toml", keys=True) as made:
        yield request.param, made


def test_all_hosts_and_the_network_that_works_are_told_apart(lab: tuple[str, Door]) -> None:
    name, door = lab
    hosts = list(door.states())
    script = ROOT / "setup" / "test_cn_connection.sh"
    asked = ("exec", hosts[0], "--", "bash", script, "--hostfile", "hosts.txt")
    done = door.run(*asked)
    assert done.code == 0 and "network eth0 (10.97.95.1 on " in done.output, done.output
    assert all(host in done.output for host in hosts) and "all is well" in done.output

    (door.home(hosts[0]) / "say.py").write_text(SAY)
    line = (
        f"export PATH={venv()}/bin:$PATH MOTLEY_VENV={venv()}; cd {ROOT} && timeout -k 1 40 mpirun "
        "-np 3 --hostfile ~/hosts.txt --mca btl_tcp_if_include 10.97.95.0/24 -x MOTLEY_VENV "
        "./entry_cn.sh ~/say.py"
    )
    done = door.run("exec", hosts[0], "--", "bash", "-c", f"{line} 2>&1")
    found = set(re.findall(r"(\S+) is at (\S+)", done.output))
    assert found == {(host, f"10.97.95.{n}") for n, host in enumerate(hosts, 1)}, done.output
    cut = "not taken: eno2 (192.168.77.1 on alpha): alpha -> beta"
    assert (cut in done.output) == (name == "plain")

    two = line.replace("--hostfile ~/hosts.txt", f"--host {hosts[1]},{hosts[2]},10.97.95.3")
    done = door.run("exec", hosts[0], "--", "bash", "-c", f"{two} 2>&1")
    assert done.code == 2 and f"10.97.95.3 and {hosts[2]} are one machine" in done.output
