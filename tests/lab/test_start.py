"""A start: what is remembered of links makes it short, and is dropped when it holds no longer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Done
from lab_door import Door, lab_up
from project import DDP, ROOT, venv

from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

NAMES = ("start1", "start2", "start3")
PROFILE = "[defaults]\nup_mbit = 100\ndown_mbit = 100\n" + "".join(
    f'[[host]]\nname = "{name}"\naddress = "10.97.99.{number}/24"\n'
    for number, name in enumerate(NAMES, 1)
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Door]:
    with lab_up(PROFILE, keys=True) as made:
        yield made


def train(lab: Door, name: str, *words: object) -> tuple[str, RunFolder]:
    """Train on all hosts; what was printed, and the records."""
    line = (
        f"export PATH={venv()}/bin:$PATH MOTLEY_VENV={venv()} OMP_NUM_THREADS=1; cd {ROOT} && "
        "mpirun -np 3 --hostfile ~/hosts.txt -x MOTLEY_VENV -x OMP_NUM_THREADS ./entry_cn.sh "
        f"{DDP} --hosts all --max-steps 11 --eval-samples 30 --logs ~/logs --run {name} "
        f"{' '.join(map(str, words))} 2>&1"
    )
    output = lab.do("exec", NAMES[0], "--", "bash", "-c", line)
    return output, RunFolder(lab.home(NAMES[0]) / "logs" / name)


def remembered(lab: Door) -> list[Path]:
    """What the first host keeps of links."""
    found = lab.on(NAMES[0], "bash", "-c", "ls /tmp/motley-*/wire-*.json 2>/dev/null || true")
    return [Path(line) for line in found.split()]


BASHRC = ROOT / "tests" / "cases" / "bashrc"
SAY = "import numpy, sys; print('well', sys.prefix in numpy.__file__)"


def start_others(lab: Door, words: str, variable: str = "LC_ALL=C") -> Done:
    """Start a process on each host but the first, from there."""
    others = ",".join(NAMES[1:])
    line = (
        f"export PATH={venv()}/bin:$PATH MOTLEY_VENV={venv()} {variable}; cd {ROOT} && "
        f"timeout -k 1 30 mpirun -np 2 --host {others} -x MOTLEY_VENV {words} 2>&1"
    )
    return lab.run("exec", NAMES[0], "--", "bash", "-c", line)


def test_a_bashrc_that_ends_the_shell_or_names_another_python(lab: Door) -> None:
    home = lab.home(NAMES[0])
    lab.give(NAMES[0], BASHRC / "ros", "ros")
    (home / "say.py").write_text(SAY)
    for case, says in (("pythonpath", ""), ("pythonhome", "PYTHONHOME=/usr/lib/python3.8 on")):
        lab.give(NAMES[0], BASHRC / case, ".bashrc")
        done = start_others(lab, "./entry_cn.sh ~/say.py")
        assert done.code == 0 and done.output.count("well True") == 2 and says in done.output

    for text in ("exit 0", "exit 3"):
        lab.on(NAMES[0], "tee", ".bashrc", stdin=text)
        done = start_others(lab, "hostname")
        assert done.code not in (0, 124, 137) and done.seconds < 15, done.output
        assert f"its login shell ended with status {text[-1]}" in done.output
        assert "motley: start" in done.output and "~/.bashrc" in done.output
    lab.on(NAMES[0], "tee", ".bashrc", stdin="echo hello; sleep 600")
    done = start_others(lab, "hostname", "MOTLEY_LOGIN_TIMEOUT=4")
    assert done.code not in (0, 124, 137) and done.seconds < 20, done.output
    assert "did not reach mpirun's daemon within 4 s" in done.output
    lab.on(NAMES[0], "tee", ".bashrc", stdin="exit 3")
    script = ROOT / "setup" / "test_cn_connection.sh"
    done = lab.run("exec", NAMES[0], "--", "bash", script, "--hostfile", "hosts.txt", "--json")
    troubles = [each["trouble"] for each in json.loads(done.output)["hosts"].values()]
    assert troubles[0] is None and [each["kind"] for each in troubles[1:]] == ["no shell"] * 2
    lab.on(NAMES[0], "rm", ".bashrc")


@pytest.mark.slow
def test_a_second_start_measures_no_link_and_one_that_became_slow_is_noticed(lab: Door) -> None:
    output, first = train(lab, "first")
    assert "the speeds of links and wire modes are from" not in output and len(remembered(lab)) == 1
    began = first.read_run()
    assert began["links_of_earlier_run"] is None
    parts = began["start"]
    assert set(parts) >= {"imports", "connect", "group", "model", "speeds", "links", "wires",
                          "plan", "engine"}  # fmt: skip
    assert all(seconds >= 0 for seconds in parts.values()) and "ready in" in output

    output, again = train(lab, "again")
    began, later = again.read_run(), parts
    parts = began["start"]
    assert parts["links"] + parts["wires"] < 0.4 * (later["links"] + later["wires"])
    assert sum(parts.values()) - parts["imports"] < sum(later.values()) - later["imports"]
    assert "the speeds of links and wire modes are from" in output
    assert first.read_run()["started"] >= began["links_of_earlier_run"]
    assert len(began["links"]["flows"]) == 6
    assert not [e for e in again.read_events() if e["event"] == "links_changed"], output

    # A cable that has become a fifth as fast, one way.
    (path,) = remembered(lab)
    kept = json.loads(lab.on(NAMES[0], "cat", path))
    lab.do("exec", "--root", NAMES[2], "--", "tc", "qdisc", "replace", "dev", "eth0", "root",
           "tbf", "rate", "20mbit", "burst", "32kb", "latency", "100ms")  # fmt: skip
    output, slow = train(lab, "slow")
    (event,) = [e for e in slow.read_events() if e["event"] == "links_changed"]
    assert "the links have changed since" in event["text"] and event["text"] in output
    assert remembered(lab) == []

    # Over links of which figures say that one host alone is faster, they are not enough.
    wires = kept["figures"]["wires"]
    for mode, (latency_s, transfer_s) in wires.items():
        wires[mode] = [latency_s, 20 * transfer_s]
    lab.on(NAMES[0], "bash", "-c", f"umask 077; cat >{path}", stdin=json.dumps(kept))
    output, out = train(lab, "out", "--hosts auto")
    about = out.read_run()
    assert len(about["left_out"]) == 2 and remembered(lab) == []
    assert about["links_of_earlier_run"] is None and about["start"]["links"] > 0.5, output
    assert "start3's link carries" in output and "when it sends" in output
