"""The connection test: what is wrong with a host is named as what it is."""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cn_judge import Here, judge, judge_networks
from cn_report import Asked, HostReport, parse
from conftest import ROOT, environment, venv
from lab_door import Door, lab_up

from motley.cluster.facts import Interface
from motley.cluster.gpus import DeviceFacts

EIGHT = "[defaults]\nshell = 'tcsh'\nhome = 'private'\n" + "".join(
    f"[[host]]\nname = 'e{number}'\naddress = '10.97.93.{number + 1}/24'\n" for number in range(8)
)
SCRIPT = ROOT / "setup" / "test_cn_connection.sh"

# -- judges

HERE = Here(
    "x86_64", "3.11.2", {"torch": "2.9.0", "nvidia-nccl-cu13": "2.28", "pytest": "9"},
    frozenset({"torch"}), Path("/lab/.venv"), Path("/lab"),
)  # fmt: skip
GPU = DeviceFacts(0, "u", "Tesla P4", (6, 1), 8000.0, 0.0, 0.0, 40.0, 20.0, 0.0, ())
WELL = HostReport(
    host="a", here=False, shell="/bin/tcsh", clock_offset_s=-0.9, clock_doubt_s=0.01,
    machine="x86_64", shm_total_mib=64.0, disk_free_mib=5000.0, disk_free_inodes=10**6,
    place="/lab", place_write="yes", home="/home/me", home_write="yes", repository=True,
    environment="3.11.2", packages={"Torch": "2.9.0", "nvidia_nccl_cu13": "2.28"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({}, None, ""),
        ({"clock_offset_s": 1.2}, "clock off", "1.2 s ahead of"),
        ({"clock_offset_s": -4000.0}, "clock off", "4,000.0 s behind"),
        ({"clock_offset_s": 1.2, "clock_doubt_s": 0.3}, None, ""),
        ({"clock_offset_s": None}, None, ""),
        ({"packages": {"torch": "2.8.0"}}, "versions differ", "torch 2.8.0 (here 2.9.0), nvidia-n"),
        ({"environment": "3.12.1"}, "versions differ", "python 3.12.1 (here 3.11.2)"),
        ({"environment": None}, "environment absent", "install_cn.sh"),
        ({"broken": "No module named 'GPUtil'"}, "environment broken", "GPUtil"),
        ({"disk_free_mib": 1000.0}, "disk full", "1,000 MiB are free"),
        ({"disk_free_mib": None, "place_write": "Disk quota exceeded"}, "disk full", "quota"),
        ({"disk_free_inodes": 3}, "disk full", "only 3 more files"),
        ({"home_write": "Read-only file system"}, "home not writable", "mount it writable"),
        ({"shm_total_mib": 63.9}, "/dev/shm small", "64 MiB"),
        ({"chatter": "Welcome!\n"}, "chatty login", ".cshrc"),
        ({"chatter": "hi", "shell": "/usr/bin/zsh"}, "chatty login", ".zshenv"),
        ({"machine": "aarch64"}, "architecture", "aarch64"),
        ({"gpu_error": "couldn't communicate"}, "driver fails", "couldn't"),
        ({"devices": (GPU, GPU)}, "torch too new", "Tesla P4 (compute capability 6.1)"),
        ({"repository": False}, "no repository", "sync_cn.sh"),
    ],
)
def test_a_thing_that_is_wrong_is_named(
    change: dict[str, object], kind: str | None, words: str
) -> None:
    wrong = [each for each in judge(replace(WELL, **change), 2, HERE) if each.wrong]  # type: ignore[arg-type]
    assert {each.kind for each in wrong} == ({kind} if kind else set())
    assert words in "".join(map(str, wrong))


def test_what_is_no_failure_is_a_note() -> None:
    turing = replace(GPU, capability=(7, 5))
    told = replace(WELL, devices=(turing,), place_write="Permission denied")
    assert {(each.kind, each.wrong) for each in judge(told, 2, HERE)} == {
        ("fewer GPUs", False),
        ("not ours to write", False),
    }


def test_hosts_on_different_subnets_are_told() -> None:
    a = replace(
        WELL, interfaces=(Interface("docker0", "172.17.0.1", 16), Interface("x", "10.0.0.1", 24))
    )
    b = replace(a, host="b", interfaces=(a.interfaces[0], Interface("y", "10.0.1.2", 24)))
    networks, apart = judge_networks([a, b])
    assert not networks and apart and "y 10.0.1.2/24" in apart.found


ASKED = Asked("a", False, 100.0, 100.4, "", "7 8 abc")
ANSWER = r"""clock=103.200000000
uid=5
gpu=0, GPU-1, 470.1, 8192, 4100, , NVIDIA GeForce RTX 3070
gpu=1, GPU-2, 470.1, [N/A], [N/A], 6.1, Tesla P4
held=GPU-1 3000 6 alice
held=GPU-1 1000 5 me
interface=eno1 10.0.0.1 24
speed=eno1 1000
python=3.14.0rc1 able /opt/my python/bin/python3
python=3.8.10 unable /usr/bin/python3
tree=9 8 abc
node=[31mred
"""


def test_an_answer_is_read() -> None:
    report = parse(ANSWER.replace(r"\x1b", "\x1b"), "", ASKED)
    assert report.clock_offset_s == pytest.approx(3.0) and report.clock_doubt_s == pytest.approx(
        0.2
    )
    first, second = report.devices
    assert (first.capability, first.others_mib, first.others) == (None, 3000.0, ("alice",))
    assert (second.name, second.capability, second.memory_total_mib) == ("Tesla P4", (6, 1), None)
    assert [each.path for each in report.pythons] == ["/opt/my python/bin/python3"]
    assert report.speeds == {"eno1": 1000} and report.driver == "470.1"
    assert report.same_folder is None  # device numbers say nothing on a network disk
    assert report.node == "?[31mred"


# -- this machine, and a lab


@pytest.mark.mpi
def test_this_machine_as_shipped_is_well() -> None:
    done = subprocess.run(
        ["bash", SCRIPT], capture_output=True, text=True, env=environment(MOTLEY_VENV=str(venv()))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nall is well" in done.stdout
    assert not list(ROOT.glob(".motley-*"))


@pytest.fixture(scope="module")
def lab() -> Iterator[Door]:
    """Eight hosts with homes of their own; e0's key opens all."""
    with lab_up(EIGHT, keys=True) as made:
        yield made


FILL = """
cp -a $1/.ssh /run/kept
mount -t tmpfs -o size=64k,mode=755 tmpfs $1
chown --reference /run/kept $1
mv /run/kept $1/.ssh
cat /dev/zero >$1/full 2>/dev/null || true
"""
FORGET = "sed -i \"s|^e5 .*|e5 $(grep ^e6 .ssh/known_hosts | cut -d ' ' -f 2-)|\" .ssh/known_hosts"


def ask(lab: Door, *words: object) -> tuple[int, dict[str, object], float]:
    """What --json says on e0."""
    done = lab.run("exec", "e0", "--", "bash", SCRIPT, "--hostfile", "hosts.txt", "--json", *words)
    assert done.code in (0, 1), done.output
    return done.code, json.loads(done.output), done.seconds


def kinds(told: dict) -> dict[str, set[str]]:  # type: ignore[type-arg]
    """What is wrong with each host, in the words of the table."""
    found = {
        host: {each["trouble"]["kind"]} if each["trouble"] else set()
        for host, each in told["hosts"].items()
    }
    for each in told["findings"]:
        for host in each["hosts"] if each["wrong"] else ():
            found.setdefault(host, set()).add(each["kind"])
    return found


@pytest.mark.mpi
def test_eight_hosts_each_with_its_own_trouble(lab: Door) -> None:
    code, told, seconds = ask(lab)
    assert code == 0 and told["well"] is True, told["findings"]
    assert seconds < 10
    home = lab.on("e0", "pwd")

    lab.do("exec", "--root", "e1", "--", "pkill", "sshd")
    lab.do("cut", "e2")
    lab.do("freeze", "e3")
    lab.on("e4", "rm", ".ssh/authorized_keys")
    lab.on("e0", "sh", "-c", FORGET)
    lab.do("exec", "--root", "e6", "--", "sh", "-c", FILL, "fill", home)
    lab.on("e7", "sh", "-c", "echo 'echo good morning' >.cshrc")
    code, told, seconds = ask(lab)
    assert code == 1 and seconds < 10
    assert kinds(told) == {
        "e0": set(),
        "e1": {"ssh refused"},
        "e2": {"no answer"},
        "e3": {"silent"},
        "e4": {"key refused"},
        "e5": {"host key changed"},
        "e6": {"disk full"},
        "e7": {"chatty login"},
    }
    lab.do("thaw", "e3")


SWAP = """
mkdir -p /run/other/torch && cd /run/other
printf 'Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n' >torch/METADATA
mount --bind torch $1
"""
MUTE = (
    "import socket, time; s = socket.create_server(('', 2222)); print(flush=True); time.sleep(60)"
)


@pytest.mark.mpi
def test_environments_keys_and_names_that_are_not_right(lab: Door) -> None:
    torch = next(venv().glob("lib/*/site-packages/torch-*.dist-info"))
    lab.do("exec", "--root", "e7", "--", "sh", "-c", SWAP, "swap", torch)
    lab.do("exec", "--root", "e3", "--", "mount", "-t", "tmpfs", "tmpfs", venv())
    lab.on("e0", "sh", "-c", "printf 'Host mute\\nHostName e0\\nPort 2222\\n' >.ssh/config")
    lab.on("e0", "sh", "-c", "chmod 644 .ssh/id_ed25519; printf '%s\\n' e0 e3 e7 mute >hosts.txt")
    mute = lab.start("exec", "e0", "--", venv() / "bin" / "python", "-c", MUTE)
    try:
        assert mute.stdout and mute.stdout.readline()
        code, told, seconds = ask(lab)
    finally:
        mute.kill()
    assert code == 1 and seconds < 10
    found = kinds(told)
    assert found.pop("this machine") == {"key open"}
    assert found.pop("e7") >= {"versions differ"}
    assert found == {"e0": set(), "e3": {"environment absent"}, "mute": {"silent"}}
    words = next(each["found"] for each in told["findings"] if each["kind"] == "versions differ")
    assert re.search(r"differs from this machine's: torch 1.0 \(here \d", words)

    lab.on("e0", "sh", "-c", "echo '-oProxyCommand=touch${IFS}ran' >hosts.txt")
    done = lab.run("exec", "e0", "--", "bash", SCRIPT, "--hostfile", "hosts.txt")
    assert done.code == 2 and "is not a host name" in done.output
    assert lab.run("exec", "e0", "--", "ls", "ran").code != 0
