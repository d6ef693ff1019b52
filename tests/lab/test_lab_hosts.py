"""The hosts of a lab are hosts: names, links, limits and faults."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import wait_until
from lab_door import NAMES, PRIVATE, SMALL, TESLA, Door, lab_up, new_door
from project import ROOT, venv

pytestmark = pytest.mark.mpi


@pytest.fixture
def door() -> Iterator[Door]:
    """A lab of this test's own."""
    with new_door() as made:
        yield made


@pytest.fixture(scope="module")
def tesla() -> Iterator[Door]:
    """The lab that the project is for."""
    with lab_up(TESLA) as made:
        yield made


def test_hosts_are_what_the_profile_says(tesla: Door) -> None:
    cards = {}
    for number, name in enumerate(NAMES, 1):
        tail = {3: 187, 4: 171}.get(number - 1, 167 + number)
        real = f"10.97.92.{tail}"
        told = tesla.on(
            name, "bash", "-c", "uname -n; hostname -I; ip -o -4 addr; ls /sys/class/net"
        )
        host, listed, *rest = told.splitlines()
        assert host == name
        # Decoys first, to whoever takes the first that is listed.
        assert listed.split() == ["172.17.0.1", f"192.168.{number}.1", real]
        assert [line.split()[1] for line in rest if " inet " in line][:2] == ["lo", "docker0"]
        cards[name] = next(line.split()[1] for line in rest if real in line)
        assert cards[name] in rest
    assert set(cards.values()) == {"eno1", "enp4s0f1", "enp0s31f6"}
    assert tesla.on("ecetesla1", "getent", "passwd", f"motley-{tesla.name}").endswith("tcsh")
    # The user cannot be somebody on the machine.
    assert f"motley-{tesla.name}" not in Path("/etc/passwd").read_text()
    lacking = tesla.run("exec", "ecetesla1", "--", "/usr/bin/python3", "-c", "import ensurepip")
    assert "No module named 'ensurepip'" in lacking.output
    tesla.on("ecetesla0", "touch", "seen-everywhere")
    assert tesla.on("ecetesla4", "ls", "seen-everywhere")


RATE = """
import socket, sys, time
seconds = 2
if sys.argv[1] == "receive":
    with socket.create_server(("", 5001)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        got = 0
        start = None
        while data := connection.recv(1 << 18):
            start = start or time.monotonic()
            got += len(data)
        print(got * 8e-6 / (time.monotonic() - start))
else:
    connection = socket.create_connection((sys.argv[1], 5001))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(bytes(1 << 15))
"""


TRIES = 15  # of 2 s each; one does on a machine that is left alone


def measure_until(measure: Callable[[], float], enough: float) -> float:
    """Return the largest of some measurements; stop at the first that is enough.

    Nothing raises a host above its limit, but other work on this machine lowers what it gets.
    """
    best = 0.0
    for _ in range(TRIES):
        best = max(best, measure())
        if best > enough:
            break
    return best


@pytest.mark.parametrize(
    ("sender", "receiver", "mbit"),
    [
        ("ecetesla1", "ecetesla2", 200),
        ("ecetesla3", "ecetesla1", 20),
        ("ecetesla1", "ecetesla3", 20),
    ],
)
def test_links_have_the_rate_of_the_profile(
    tesla: Door, sender: str, receiver: str, mbit: float
) -> None:
    def measure() -> float:
        python = venv() / "bin" / "python"
        job = tesla.start("exec", receiver, "--", python, "-c", RATE, "receive")
        assert job.stdout and job.stdout.readline() == "ready\n"
        tesla.on(sender, python, "-c", RATE, receiver)
        return float(job.communicate(timeout=10)[0])

    with subprocess.Popen([sys.executable, ROOT / "lab" / "lab_awake.py"]) as awake:
        best = measure_until(measure, 0.9 * mbit)
        awake.kill()
    assert 0.9 * mbit < best < 1.1 * mbit


BURN = """
import time
start = time.monotonic()
while time.monotonic() < start + 2:
    pass
print(time.process_time() / (time.monotonic() - start))
"""


def test_a_host_has_the_processors_that_it_is_given(tesla: Door) -> None:
    def share() -> float:
        return float(tesla.on("ecetesla1", venv() / "bin" / "python", "-c", BURN))

    tesla.do("cpus", "ecetesla1", "0.2")
    assert 0.1 < measure_until(share, 0.1) < 0.3
    tesla.do("cpus", "ecetesla1", "all")
    assert measure_until(share, 0.4) > 0.4
    refused = tesla.run("cpus", "ecetesla1", "0,5")
    assert refused.code == 2 and "0,5 is neither a number of 0.01 or more nor all" in refused.output


PROBE = """
import socket
try:
    with socket.create_connection(("ecetesla2", 22), 1) as connection:
        print("answers" if connection.recv(99).startswith(b"SSH-2.0") else "closes")
except TimeoutError:
    print("silent")
except OSError as error:
    print("unreachable", error)
"""


def test_hosts_are_cut_frozen_and_switched_off_and_come_back(tesla: Door) -> None:
    def probe() -> str:
        return tesla.on("ecetesla1", venv() / "bin" / "python", "-c", PROBE)

    def keys() -> str:
        return tesla.on("ecetesla1", "ssh-keyscan", "-t", "ed25519", "ecetesla2").splitlines()[-1]

    assert probe() == "answers"
    key = keys()
    for harm, state, undo in (("cut", "cut", "heal"), ("freeze", "frozen", "thaw")):
        tesla.do(harm, "ecetesla2")
        assert tesla.states() == {**dict.fromkeys(NAMES, "on"), "ecetesla2": state}
        assert probe() == "silent"
        assert "already" in tesla.do(harm, "ecetesla2")
        tesla.do(undo, "ecetesla2")
        wait_until(lambda: probe() == "answers", 10)

    # A cable is cut both ways: the host reaches nobody either.
    tesla.do("cut", "ecetesla1")
    assert probe() != "answers"
    tesla.do("heal", "ecetesla1")

    job = tesla.start("exec", "ecetesla2", "--", "sleep", "1000")
    wait_until(lambda: "sleep" in tesla.on("ecetesla2", "ps", "-u", f"motley-{tesla.name}"), 10)
    tesla.do("freeze", "ecetesla2")  # off must work on a frozen host too
    tesla.do("kill", "ecetesla2")
    assert job.wait(5) != 0
    assert tesla.states()["ecetesla2"] == "off" and probe() != "answers"
    refused = tesla.run("exec", "ecetesla2", "--", "true")
    assert refused.code == 2 and "lab.sh boot ecetesla2" in refused.output
    tesla.do("boot", "ecetesla2")
    assert tesla.states()["ecetesla2"] == "on" and keys() == key
    assert probe() == "answers"


BY_PASSWORD = """
umask 077
printf '#!/bin/sh\necho %s\n' "$1" >askpass
chmod +x askpass
SSH_ASKPASS=./askpass SSH_ASKPASS_REQUIRE=force ssh -o StrictHostKeyChecking=no \\
  -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR ecetesla4 uname -n
rm askpass
"""


def test_the_password_of_the_status_table_opens_every_host(tesla: Door) -> None:
    match = re.search(r"password (\w+)", tesla.do("status"))
    assert match
    assert tesla.on("ecetesla1", "bash", "-c", BY_PASSWORD, "login", match[1]) == "ecetesla4"
    wrong = tesla.run("exec", "ecetesla1", "--", "bash", "-c", BY_PASSWORD)
    assert "Permission denied" in wrong.output


SPIN = """
import time
end = time.monotonic() + 2
while time.monotonic() < end:
    pass
print(time.process_time() / 2)
"""


def test_limits_hold_beside_another_lab(tesla: Door, door: Door, tmp_path: Path) -> None:
    profile = tmp_path / "small.toml"
    profile.write_text(SMALL)
    door.do("up", "--profile", profile)
    assert tesla.states()["ecetesla0"] == "on"
    python = venv() / "bin" / "python"
    assert float(door.on("small1", python, "-c", SPIN)) < 0.36
    greedy = door.run("exec", "small1", "--", python, "-c", "len(bytearray(200 << 20))")
    assert greedy.code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    full = door.run(
        "exec", "small1", "--", "dd", "if=/dev/zero", "of=/dev/shm/x", "bs=1M", "count=9"
    )
    assert "No space left" in full.output
    assert door.on("small2", "printenv", "SHELL").endswith("tcsh")


def test_homes_can_be_private_and_python_absent(door: Door) -> None:
    door.do("up", "--profile", PRIVATE)
    door.on("alone1", "touch", "mine")
    assert door.run("exec", "alone2", "--", "ls", "mine").code != 0
    assert door.run("exec", "alone3", "--", "bash", "-c", "command -v python3").code != 0
    assert door.on("alone1", "bash", "-c", "command -v python3")
