"""The connection test: what is wrong with a host is named as what it is."""

from dataclasses import replace
from pathlib import Path

import pytest

from motley.cluster.facts import Interface
from motley.cluster.gpus import DeviceFacts
from motley.errors import HostTrouble
from motley.provision.connection_report import Here, judge, judge_networks
from motley.provision.host_report import HostQuery, HostReport, parse
from motley.provision.leave_cn import ask_agent
from motley.provision.setup_command import print_troubles, run_module

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
        ({"temporary": "/tmp", "temporary_write": "No space left on device"}, "disk full", "df -i"),
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


ASKED = HostQuery("a", False, 100.0, 100.4, "", "7 8 abc")
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


def test_hosts_of_which_the_same_is_to_be_said_share_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = {
        "cn1": ("MPI's file cannot be written on cn1 (cn10 has it)", "ask anna"),
        "cn2": ("MPI's file cannot be written on cn2 (cn10 has it)", "ask anna"),
        "cn3": ("cn3 did not answer", "ssh -- cn3"),
        "cn4": ("cn4 did not answer", "ssh -- cn4"),
    }
    print_troubles({host: HostTrouble("", *text) for host, text in texts.items()})
    assert capsys.readouterr().out == (
        "\nMPI's file cannot be written on cn1, cn2 (cn10 has it)\n  ask anna\n"
        "\ncn3 did not answer\n  ssh -- cn3\n\ncn4 did not answer\n  ssh -- cn4\n"
    )


def test_a_hosts_own_agent_answers(tmp_path: Path) -> None:
    assert not ask_agent("localhost", "ask", tmp_path)["sees"]
    (tmp_path / "run.json").write_text("{}")
    assert ask_agent("localhost", "ask", tmp_path)["sees"]
    with pytest.raises(HostTrouble, match=r"a command fails in the environment: .*no_module"):
        run_module("localhost", "motley.no_module", limit=20)
