"""The lab in a box: real hosts come up, behave as asked, and leave nothing behind."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import DDP, ROOT, Done, environment, venv, wait_until

pytestmark = pytest.mark.mpi

TESLA = ROOT / "lab" / "tesla.toml"
NAMES = [f"ecetesla{number}" for number in range(5)]

# Two hosts with little of everything.
SMALL = """
[defaults]
cpus = 0.3
memory_mib = 96
shm_mib = 8
[[host]]
name = "small1"
address = "10.97.95.1/24"
[[host]]
name = "small2"
address = "10.97.95.2/24"
shell = "tcsh"
"""


@pytest.fixture(autouse=True, scope="module")
def root_alone() -> None:
    """The lab needs root; without, there is nothing to test."""
    if os.geteuid() != 0:
        message = "not root, so the lab is not tried"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


@dataclass(frozen=True)
class Door:
    """lab/lab.sh for one lab."""

    name: str

    def start(self, *words: object) -> subprocess.Popen[str]:
        """A command of lab.sh, not waited for; what follows ``--`` goes last."""
        given = [str(word) for word in words]
        at = given.index("--") if "--" in given else len(given)
        return subprocess.Popen(
            ["bash", "lab/lab.sh", *given[:at], "--name", self.name, *given[at:]],
            cwd=ROOT, env=environment(MOTLEY_VENV=str(venv())), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *words: object, stdin: str = "", limit: float = 60) -> Done:
        """The same, waited for."""
        start = time.monotonic()
        job = self.start(*words)
        try:
            output, _ = job.communicate(stdin, timeout=limit)
        finally:
            job.kill()
        return Done(job.returncode, output, time.monotonic() - start)

    def do(self, *words: object, stdin: str = "", limit: float = 60) -> str:
        """The same, which must succeed; its output."""
        done = self.run(*words, stdin=stdin, limit=limit)
        assert done.code == 0, done.output
        return done.output.strip()

    def on(self, host: str, *command: object, **options: str) -> str:
        """A command on a host, as the lab's user."""
        return self.do("exec", host, "--", *command, **options)

    def states(self) -> dict[str, str]:
        """The last column of the status table."""
        rows = self.do("status").splitlines()[2:]
        return {re.split(r"\s{2,}", row)[0]: re.split(r"\s{2,}", row)[-1] for row in rows}

    def processes(self) -> list[int]:
        """Its processes, by the mark that they carry."""
        mark = f"MOTLEY_LAB={self.name}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found


@pytest.fixture
def door() -> Iterator[Door]:
    """A lab of this test's own, taken down whatever happens."""
    made = Door(f"t{secrets.token_hex(4)}")
    yield made
    made.run("down")


@pytest.fixture(scope="module")
def tesla() -> Iterator[Door]:
    """The lab that the project is for; the user's keys lie on its shared home."""
    made = Door(f"t{secrets.token_hex(4)}")
    try:
        made.do("up", "--profile", TESLA)
        yield made
    finally:
        made.run("down")


def machine() -> dict[str, object]:
    """What of this machine no lab may change."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    return {
        "accounts": [Path("/etc", name).read_text() for name in ("passwd", "shadow", "group")],
        "mounts": Path("/proc/self/mounts").read_text(),
        "interfaces": re.findall(r"^\d+: ([^:@]+)", links.stdout, re.MULTILINE),
    }


def namespaces(pids: list[int] | None = None) -> set[str]:
    """Namespaces of these processes, or of all that there are."""
    folders = Path("/proc").glob("[0-9]*") if pids is None else [Path(f"/proc/{p}") for p in pids]
    found = set()
    for folder in folders:
        for kind in ("net", "mnt", "uts", "ipc", "pid_for_children"):
            try:
                found.add(str((folder / "ns" / kind).readlink()))
            except OSError:
                continue
    return found


def left_of(door: Door) -> list[object]:
    """All that is there of a lab that should be gone."""
    cgroups = [p for p in Path("/sys/fs/cgroup").rglob(f"*{door.name}*") if p.is_dir()]
    folder = Path("/var/lib/motley-lab", door.name)
    named = [line for line in Path("/proc/self/mounts").open() if door.name in line]
    return [*door.processes(), *cgroups, *([folder] if folder.exists() else []), *named]


def test_up_and_down_are_quick_and_leave_nothing(door: Door) -> None:
    before = machine()
    up = door.run("up", "--profile", TESLA)
    assert up.code == 0 and up.seconds < 10, up
    assert door.states() == dict.fromkeys(NAMES, "on")
    assert "already up" in door.do("up", "--profile", TESLA)
    other = door.run("up", "--profile", ROOT / "lab" / "equal.toml")
    assert other.code == 2 and "another profile" in other.output
    own = namespaces(door.processes()) - namespaces([os.getpid()])
    assert len(own) >= 5 * 5  # five kinds on each host
    down = door.run("down")
    assert down.code == 0 and down.seconds < 5, down
    assert left_of(door) == []
    assert not own & namespaces()
    assert machine() == before
    assert "is not up" in door.do("down")


@pytest.mark.parametrize("seconds", [0.15, 0.3, 0.5])
def test_down_clears_what_a_killed_up_left(door: Door, seconds: float) -> None:
    before = machine()
    job = door.start("up", "--profile", TESLA)
    time.sleep(seconds)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    own = namespaces(door.processes()) - namespaces([os.getpid()])
    door.do("down")
    assert left_of(door) == []
    assert not own & namespaces()
    assert machine() == before


def test_up_again_finishes_what_a_killed_up_began(door: Door, tmp_path: Path) -> None:
    profile = tmp_path / "small.toml"
    profile.write_text(SMALL)
    job = door.start("up", "--profile", profile)
    wait_until(lambda: bool(door.processes()), 10)
    job.kill()
    job.communicate()
    assert "starting again" in door.do("up", "--profile", profile)
    assert door.states() == {"small1": "on", "small2": "on"}


def test_a_dry_run_changes_nothing(door: Door) -> None:
    output = door.do("up", "--dry-run")
    assert "would run: nsenter" in output and "mount -t tmpfs" in output
    assert left_of(door) == []


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
    python = venv() / "bin" / "python"
    job = tesla.start("exec", receiver, "--", python, "-c", RATE, "receive")
    assert job.stdout and job.stdout.readline() == "ready\n"
    tesla.on(sender, python, "-c", RATE, receiver)
    measured = float(job.communicate(timeout=10)[0])
    assert 0.9 * mbit < measured < 1.1 * mbit


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


KEYS = """
set -e
mkdir -m 700 .ssh
ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519
cp .ssh/id_ed25519.pub .ssh/authorized_keys
ssh-keyscan -t ed25519 $(cut -d ' ' -f 1 hosts.txt) >.ssh/known_hosts 2>/dev/null
for host in $(cut -d ' ' -f 1 hosts.txt); do
  ssh -o BatchMode=yes "$host" 'echo $shell `uname -n`; ssh -o BatchMode=yes ecetesla0 uname -n'
done
"""

TRAIN = f"""
cd {ROOT} && export PATH={venv()}/bin:$PATH
exec mpirun -np 5 --hostfile ~/hosts.txt -x MOTLEY_VENV --prtemca plm_ssh_no_tree_spawn 1 \\
  --mca btl_tcp_if_include 10.97.92.0/24 --prtemca prte_if_include 10.97.92.0/24 \\
  ./entry_cn.sh {DDP} --max-steps 3 --logs ~/logs --run five
"""


def test_five_hosts_train_over_ssh_under_tcsh(tesla: Door) -> None:
    told = tesla.on("ecetesla0", "bash", stdin=KEYS).splitlines()
    shell = shutil.which("tcsh")
    assert told == [line for name in NAMES for line in (f"{shell} {name}", "ecetesla0")]
    tesla.do("exec", "ecetesla0", "--", "bash", stdin=TRAIN, limit=180)
    run = json.loads(tesla.on("ecetesla0", "cat", "logs/five/run.json"))
    assert run["status"] == "finished"
    steps = [tesla.on("ecetesla4", "cat", f"logs/five/steps.rank{rank}.jsonl") for rank in range(5)]
    assert [len(lines.splitlines()) for lines in steps] == [3] * 5
    found = tesla.on("ecetesla0", "bash", "-c", "ls logs/five/gpu.*.csv").splitlines()
    assert [Path(name).name for name in found] == [f"gpu.{name}.csv" for name in NAMES]


def test_limits_hold_beside_another_lab(tesla: Door, door: Door, tmp_path: Path) -> None:
    profile = tmp_path / "small.toml"
    profile.write_text(SMALL)
    door.do("up", "--profile", profile)
    assert tesla.states()["ecetesla0"] == "on"
    python = venv() / "bin" / "python"
    spin = "import time; e = time.time() + 2\nwhile time.time() < e: pass\nprint(time.process_time() / 2)"
    assert float(door.on("small1", python, "-c", spin)) < 0.36
    greedy = door.run("exec", "small1", "--", python, "-c", "len(bytearray(200 << 20))")
    assert greedy.code == 137
    full = door.run(
        "exec", "small1", "--", "dd", "if=/dev/zero", "of=/dev/shm/x", "bs=1M", "count=9"
    )
    assert "No space left" in full.output
    assert door.on("small2", "printenv", "SHELL").endswith("tcsh")


def test_homes_can_be_private_and_python_absent(door: Door) -> None:
    door.do("up", "--profile", ROOT / "lab" / "private.toml")
    door.on("alone1", "touch", "mine")
    assert door.run("exec", "alone2", "--", "ls", "mine").code != 0
    assert door.run("exec", "alone3", "--", "bash", "-c", "command -v python3").code != 0
    assert door.on("alone1", "bash", "-c", "command -v python3")


HOST = '[[host]]\nname = "a"\naddress = "10.97.96.1/24"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HOST + 'up_mbits = 5\n', "unknown key 'up_mbits' in host a (nearest: up_mbit"),
        ("[default]\n" + HOST, "unknown key 'default' (nearest: defaults)"),
        (HOST + HOST.replace('"a"', '"b"'), "a and b both have 10.97.96.1"),
        (HOST + HOST, "two hosts are called a"),
        (HOST + 'decoys = ["docker0 10.97.96.1/16"]\n', "is a's address"),
        (HOST.replace("10.97.96.1/24", "10.97.96.300/24"), "write it like"),
        (HOST.replace('"a"', '"-oProxyCommand=x"'), "is not a host name"),
        (HOST + 'interface = "x; reboot"\n', "no name for an interface"),
        (HOST + 'shell = "fish"\n', "choose bash, tcsh, zsh"),
        (HOST + "cpus = 0\n", "0.01 or more"),
        (HOST.replace("10.97.96.1/24", "127.0.0.1/8"), "in use on this machine (lo)"),
        ("", "names no host"),
        ("[[host", "cannot be read"),
    ],
)  # fmt: skip
def test_bad_profiles_make_nothing(door: Door, tmp_path: Path, text: str, said: str) -> None:
    profile = tmp_path / "bad.toml"
    profile.write_text(text)
    done = door.run("up", "--profile", profile)
    assert done.code == 2 and said in done.output and len(done.output.splitlines()) == 1
    assert left_of(door) == []


def test_other_users_are_told_that_it_needs_root(door: Door) -> None:
    python = venv() / "bin" / "python"
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", python, "lab/lab.py", "up"],
        cwd=ROOT, text=True, capture_output=True, check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 2 and "needs root" in done.stderr
    missing = door.run("exec", "ecetesla9", "--", "true")
    assert missing.code == 2 and "is not up" in missing.output
