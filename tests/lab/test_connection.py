"""The connection test on this machine, and on eight hosts with troubles of their own."""

import json
import re
import subprocess
from collections.abc import Iterator

import pytest
from lab_door import Door, lab_up
from project import ROOT, environment, venv

pytestmark = pytest.mark.mpi


EIGHT = "[defaults]\nshell = 'tcsh'\nhome = 'private'\n" + "".join(
    f"[[host]]\nname = 'e{number}'\naddress = '10.97.93.{number + 1}/24'\n" for number in range(8)
)


SCRIPT = ROOT / "setup" / "test_cn_connection.sh"


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
    assert re.search(r"differ from this machine's: torch 1.0 \(here \d", words)

    lab.on("e0", "sh", "-c", "echo '-oProxyCommand=touch${IFS}ran' >hosts.txt")
    done = lab.run("exec", "e0", "--", "bash", SCRIPT, "--hostfile", "hosts.txt")
    assert done.code == 2 and "is not a host name" in done.output
    assert lab.run("exec", "e0", "--", "ls", "ran").code != 0
