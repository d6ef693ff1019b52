"""The users' first day: five hosts and a password become a trained model, its log and pictures.

On lab/tesla.toml: ssh with a password, tcsh, no pip, no ensurepip, homes on one disk, three
interface names, docker0 listed first; all as an unprivileged user.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from jobs import Done
from lab_door import NAMES, TESLA, Door, lab_up
from lab_terminal import Terminal

from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

HEAD = NAMES[0]
# Two fast ones of the hosts run alone what needs no head; the head has a third of a processor.
QUICK = NAMES[1]
AT_HOME = "unset MOTLEY_VENV; cd motley; export PATH=$PWD/.venv/bin:$PATH OMP_NUM_THREADS=1; "
HOSTS = "--hostfile ~/hosts.txt"


def at(door: Door, host: str, script: str) -> str:
    return door.do("exec", host, "--", "bash", "-c", AT_HOME + script)


@pytest.fixture(scope="module")
def told(parts: Path) -> Iterator[tuple[Door, dict[str, str]]]:
    """The lab, and what each script said that made it ready, in the order of the README."""
    with lab_up(TESLA) as door:
        for name in NAMES:
            door.do("cpus", name, "all")  # imports with a third of a processor take a minute
        # Threads of five hosts that are one machine would only wait for each other.
        door.on(HEAD, "sh", "-c", "echo setenv OMP_NUM_THREADS 1 >>.cshrc")
        door.give_repository(HEAD)
        door.give(HEAD, parts, "parts")
        said = {}
        made = "make_env.sh --wheels ~/parts --lock ~/parts/requirements.lock"
        archive = "--python-archive ~/parts/python.tar.gz"
        said["environment"] = at(door, QUICK, f"bash setup/{made} {archive}")
        said["keys"] = type_password(door, f"bash setup/passwordless_ssh.sh {HOSTS}").output
        said["shell"] = at(door, HEAD, f"bash setup/change_cn_shell.sh {HOSTS} --dry-run")
        said["install"] = at(door, HEAD, f"bash setup/install_cn.sh {HOSTS}")
        said["connection"] = at(door, HEAD, f"bash setup/test_cn_connection.sh {HOSTS}")
        said["mpi"] = at(door, HEAD, f"bash setup/test_mpi.sh {HOSTS}")
        yield door, said


def type_password(door: Door, script: str) -> Done:
    terminal = Terminal(door, HEAD, "bash", "-c", AT_HOME + script)
    return terminal.answer(("[y/N]", "y"), ("Password of", door.password()))


def test_every_script_says_that_all_is_well(told: tuple[Door, dict[str, str]]) -> None:
    door, said = told
    assert "getting one of its own" in said["environment"] or "no Python" in said["environment"]
    assert said["keys"].count("works") == 4
    assert said["shell"].count("tcsh") >= 5
    assert said["install"].count("shares this folder") == 4
    assert said["install"].count("cpu fp32") == 5
    assert "all is well" in said["connection"] and said["connection"].count("enp4s0f1") == 3
    assert "the hosts share 10.97.92.0/24" in said["mpi"]
    lines = [line for line in said["mpi"].splitlines() if line.startswith("ecetesla")]
    rows = [line.split() for line in lines if " sends " not in line]
    assert [row[1] for row in rows] == ["eno1", "enp4s0f1", "enp4s0f1", "enp0s31f6", "enp4s0f1"]
    assert all(row[3:] == ["yes", "1", "of", "1", "1", "of", "1"] for row in rows)
    assert len(lines) == len(rows) + 5 and "note: ecetesla3's link carries" in said["mpi"]
    assert not any(door.password() in text for text in said.values())


@pytest.fixture(scope="module")
def alone(told: tuple[Door, dict[str, str]]) -> list[float]:
    """The losses of one host's first five steps."""
    door, _ = told
    at(door, QUICK, "./entry_cn.sh --precision fp32 --epochs 30 --max-steps 5 --run one")
    return losses(door, "one", 0)


def losses(door: Door, run: str, rank: int) -> list[float]:
    path = door.home(HEAD) / "motley" / "logs" / run / f"steps.rank{rank}.jsonl"
    return [json.loads(line)["loss"] for line in path.open()]


def run_json(door: Door, run: str) -> dict[str, Any]:
    return json.loads((door.home(HEAD) / "motley" / "logs" / run / "run.json").read_text())


def test_the_plain_line_trains_over_five_hosts_as_on_one(
    told: tuple[Door, dict[str, str]], alone: list[float]
) -> None:
    door, _ = told
    script = "./entry_cn.sh torch_dist/train_vit.py --precision fp32 --epochs 30 --max-steps 5"
    at(door, HEAD, f"mpirun -np 5 {HOSTS} {script} --hosts all --run five")
    run = run_json(door, "five")
    assert run["status"] == "finished"
    rates: dict[bool, list[float]] = {True: [], False: []}  # Mbit/s, by whether the slow one is in
    for flow in run["links"]["flows"]:
        rates[NAMES[3] in (flow["from"], flow["to"])].append(flow["bytes_per_s"] * 8e-6)
    assert len(rates[True]) == 8 and 10 < median(rates[True]) < 22
    assert len(rates[False]) == 12 and 100 < median(rates[False]) < 220
    assert len(alone) == 5
    for rank in range(5):
        assert losses(door, "five", rank) == pytest.approx(alone, rel=2e-6)


@pytest.mark.turns("over hosts as on one")
def test_so_does_deepspeed_over_three(
    told: tuple[Door, dict[str, str]], alone: list[float]
) -> None:
    door, _ = told
    script = "./entry_cn.sh deepspeed/train_vit.py --precision fp32 --epochs 30 --max-steps 5"
    hosts = ",".join((HEAD, *NAMES[3:]))  # of three interface names
    at(door, HEAD, f"mpirun -np 3 --host {hosts} {script} --hosts all --run deepspeed")
    assert run_json(door, "deepspeed")["status"] == "finished"
    for rank in range(3):
        assert losses(door, "deepspeed", rank) == pytest.approx(alone, rel=2e-6)


def test_the_pictures_hold_five_hosts(told: tuple[Door, dict[str, str]]) -> None:
    door, _ = told
    logs = door.home(HEAD) / "motley" / "logs" / "five"
    assert {path.name for path in logs.glob("gpu.*.csv")} == {f"gpu.{name}.csv" for name in NAMES}
    at(door, QUICK, "python plots/plot_gpu.py logs; python plots/plot_training.py logs")
    for picture in (logs / "gpu.png", logs / "training.png"):
        assert picture.stat().st_size > 20_000


@pytest.mark.turns("over hosts as on one")
def test_a_head_that_would_only_be_waited_for_leads_and_does_not_train(
    told: tuple[Door, dict[str, str]], alone: list[float]
) -> None:
    door, _ = told
    job = (
        f"mpirun -np 2 --host {HEAD},{QUICK} ./entry_cn.sh tests/support/drivers/slow_head.py "
        "--precision fp32 --epochs 30 --save-every 3 --run led"
    )
    at(door, HEAD, f"{job} --max-steps 3")
    said = at(door, HEAD, f"{job} --max-steps 5 --resume auto")
    assert f"rank 0 on {HEAD} is left out: its share would be less than one sample" in said
    run = run_json(door, "led")
    assert run["status"] == "finished" and run["result"]["steps"] == 5
    assert [rank["rank"] for rank in run["ranks"]] == [1]
    assert losses(door, "led", 1) == pytest.approx(alone, rel=2e-6)
    logs = door.home(HEAD) / "motley" / "logs" / "led"
    assert {path.name for path in logs.glob("gpu.*.csv")} == {f"gpu.{HEAD}.csv", f"gpu.{QUICK}.csv"}


@pytest.mark.turns("over hosts as on one")
def test_a_task_of_ones_own_ends_as_on_one_host_though_a_rank_was_killed(
    told: tuple[Door, dict[str, str]],
) -> None:
    door, _ = told
    lines = (door.home(HEAD) / "motley" / "examples" / "my_task.py").read_text().splitlines()
    assert len(lines) <= 45
    words = "--task examples/my_task.py --digits 3 --precision fp32 --warmup-epochs 0"
    words += " --batch-size 1000 --epochs 30 --max-steps 18"
    at(door, QUICK, f"./entry_cn.sh torch_dist/train.py {words} --run sums")
    two = f"mpirun -np 2 --host {HEAD},{NAMES[4]} ./entry_cn.sh"
    words += " --hosts all --save-every 4 --run killed"  # all would not pay for so small a model
    killed = f"{AT_HOME} {two} tests/support/drivers/failing.py --fail killed --step 11 {words}"
    done = door.run("exec", HEAD, "--", "bash", "-c", killed)
    assert (
        f"motley: rank 1 on {NAMES[4]}" in done.output and "died without a message" in done.output
    )
    assert run_json(door, "killed")["status"] == "failed"
    said = at(door, HEAD, f"{two} torch_dist/train.py {words} --resume auto")
    # Of the last step, if the others were quicker than mpirun, which ends them half a second later.
    assert "step_00000011" in said or "step_00000008" in said
    one, many = run_json(door, "sums"), run_json(door, "killed")
    shares = many["plan"]["shares"]
    assert len(shares) == 2 and len(set(shares)) > 1  # beside other tests one host may take all
    expected = losses(door, "sums", 0)
    assert len(expected) == 18 and expected[-1] < 0.97 * expected[0]
    assert losses(door, "killed", 0) == pytest.approx(expected, rel=2e-6)
    folder = RunFolder(door.home(HEAD) / "motley" / "logs" / "killed")
    for steps in folder.read_steps().values():  # who is killed does not write its last ones
        assert len(steps) > 15
        for step in steps:
            assert step["loss"] == pytest.approx(expected[step["step"]], rel=2e-6)
    assert many["result"]["loss"] == pytest.approx(one["result"]["loss"], rel=2e-6)


def test_an_mtu_that_drops_large_packets_is_said_and_nothing_hangs(
    told: tuple[Door, dict[str, str]],
) -> None:
    # Two hosts with jumbo frames on a switch without: they agree on packets that it drops. Both
    # talk well with all others, as ssh from the head shows.
    door, _ = told
    jumbo = (NAMES[1], NAMES[2])

    def frames(size: int, segments: int) -> None:
        for name in jumbo:  # one segment a packet, as a cable carries them
            change = ("mtu", size, "gso_max_segs", segments)
            door.do("exec", name, "--root", "--", "ip", "link", "set", "dev", "enp4s0f1", *change)

    frames(9000, 1)
    said = at(door, HEAD, f"bash setup/test_mpi.sh {HOSTS}")
    names = rf"from {jumbo[0]} to {jumbo[1]}: small messages arrive and large ones do not; compare"
    assert names in said
    job = "./entry_cn.sh --max-steps 3 --run jumbo"
    three = f"{AT_HOME} mpirun -np 3 --host {HEAD},{','.join(jumbo)} {job}"
    refused = door.run("exec", HEAD, "--", "bash", "-c", three)
    print(refused.seconds, refused.output)
    assert (
        refused.code != 0
        and f"some hosts cannot reach each other: {names} the MTU" in refused.output
    )
    assert "remove one of the two hosts from hosts.txt" in refused.output
    at(door, HEAD, f"mpirun -np 2 --host {HEAD},{jumbo[0]} {job} --hosts all")
    frames(1500, 65535)
