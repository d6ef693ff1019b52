"""Environments and files come to hosts with folders, and Pythons, of their own."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, wait_until
from lab_door import Door, new_door
from lab_wheels import make_python_archive, make_wheels
from torch_builds import PYPI, HostGpu, choose_build

from motley.errors import MotleyError

HEAD, OTHERS = "alone1", ("alone2", "alone3")
OFFLINE = "--offline ~/wheels --python-archive ~/wheels/python.tar.gz --hostfile ~/hosts.txt"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Three hosts with keys, and the first with this repository, wheels and an environment."""
    wheels = tmp_path_factory.mktemp("wheels")
    make_wheels(wheels)
    make_python_archive(wheels / "python.tar.gz")
    with new_door() as door:
        door.do("up", "--profile", ROOT / "lab" / "private.toml")
        door.give_keys()
        door.give_repository(HEAD)
        door.give(HEAD, wheels, "wheels")
        told = at_head(
            door, "setup/make_env.sh --wheels ~/wheels --lock ~/wheels/requirements.lock"
        )
        assert "environment: ready" in told
        yield door


def command(script: str) -> list[str]:
    return ["exec", HEAD, "--", "bash", "-c", f"unset MOTLEY_VENV; cd motley; bash {script}"]


def at_head(door: Door, script: str) -> str:
    return door.do(*command(script), limit=120)


@pytest.mark.mpi
def test_install_finishes_what_a_killed_one_began(lab: Door) -> None:
    dry = at_head(lab, f"setup/install_cn.sh {OFFLINE} --dry-run")
    assert "alone3: would send" in dry and "--python-archive" in dry
    assert not any((lab.home(host) / "motley").exists() for host in OTHERS)

    job = lab.start(*command(f"setup/install_cn.sh {OFFLINE}"))
    log = lab.home("alone2") / "motley" / ".venv" / "install.log"
    wait_until(log.exists, 60)  # pip is at work there
    job.send_signal(signal.SIGKILL)
    job.communicate()
    wait_until(lambda: "pip" not in lab.on("alone2", "ps", "-ef"), 20)  # nothing outlives it

    told = at_head(lab, f"setup/install_cn.sh {OFFLINE}")
    assert told.count("environment: ready") == 2 and told.count("cpu fp32") == 3
    packages = [(lab.home(host) / "motley/.venv/requirements.lock").read_text()
                for host in (HEAD, *OTHERS)]  # fmt: skip
    assert packages[0] == packages[1] == packages[2] and "mpi4py==" in packages[0]
    assert not (lab.home("alone3") / "motley/.venv-parcels").exists()
    assert at_head(lab, f"setup/install_cn.sh {OFFLINE}").count("environment is current") == 2

    changed = lab.home("alone2") / "motley" / "hosts.txt"
    changed.write_text("other slots=1\n")
    (lab.home("alone2") / "motley" / "mine.txt").touch()
    told = at_head(lab, "setup/sync_cn.sh --hostfile ~/hosts.txt")
    assert "sent 1 files: hosts.txt" in told and "already the same" in told
    assert changed.read_bytes() == (ROOT / "hosts.txt").read_bytes()
    assert (lab.home("alone2") / "motley" / "mine.txt").exists()


@pytest.mark.mpi
def test_install_says_what_is_missing_before_it_begins(lab: Door) -> None:
    for words, said in (
        ("--offline /usr", "lacks"),
        ("--python-archive nowhere.tar.gz", "is no file"),
        ("--offlin x", "unrecognized arguments"),
    ):
        done = lab.run(*command(f"setup/install_cn.sh {words}"))
        assert done.code == 2 and said in done.output and len(done.output.splitlines()) == 1


def test_a_standalone_python_comes_from_a_mirror_and_is_checked(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine = subprocess.check_output(["uname", "-m"], text=True).strip()
    name = f"cpython-{version}.9+20990101-{machine}-unknown-linux-gnu-install_only.tar.gz"
    mirror, target = tmp_path / "mirror", tmp_path / "python"
    mirror.mkdir()
    make_python_archive(mirror / name)
    digest = subprocess.check_output(["sha256sum", mirror / name], text=True).split()[0]
    older = name.replace(".9+", ".10+").replace("install_only", "debug")

    def get(sha: str) -> subprocess.CompletedProcess[str]:
        (mirror / "SHA256SUMS").write_text(f"{sha}  {name}\n{'0' * 64}  {older}\n")
        return subprocess.run(
            ["bash", ROOT / "setup/get_python.sh", target, "--version", version],
            env={"PATH": "/usr/bin:/bin", "MOTLEY_PYTHON_URL": mirror.as_uri()},
            text=True, capture_output=True, check=False,
        )  # fmt: skip

    bad = get("1" * 64)
    assert bad.returncode == 1 and "is not what its SHA256SUMS says" in bad.stderr
    assert not target.exists()
    good = get(digest)
    assert good.returncode == 0, good.stderr
    told = subprocess.check_output([target / "bin/python3", "-c", "import sys; print(sys.prefix)"])
    assert Path(told.decode().strip()) == target
    assert [path.name for path in tmp_path.iterdir() if "python" in path.name] == ["python"]


P4 = HostGpu("ecetesla0", "Tesla P4", (6, 1), "535.183.01")
GTX = HostGpu("ecetesla3", "NVIDIA GeForce GTX 1070", None, "470.256.02")
RTX = HostGpu("ecetesla1", "NVIDIA GeForce RTX 3070", (8, 6), "580.82.07")
BLACKWELL = HostGpu("new", "NVIDIA RTX PRO 6000", (12, 0), "580.82.07")


@pytest.mark.parametrize(
    ("gpus", "installed", "build"),
    [
        ([], "2.15.0", PYPI),
        ([], "2.9.1+cpu", "cpu"),
        ([RTX], "2.15.0", PYPI),
        ([RTX], "2.9.1+cu128", "cu128"),  # it works: not replaced
        ([RTX], "2.9.1+cpu", PYPI),
        ([RTX, P4], "2.15.0", "cu126"),
        ([RTX, GTX], "2.15.0", "cu118"),  # by its driver; its capability by its name
        ([HostGpu("b", "NVIDIA RTX 4090", (8, 9), "550.54.14"), BLACKWELL], "2.15.0", "cu128"),
    ],
)
def test_torch_is_chosen_by_the_oldest_gpu_and_the_lowest_driver(
    gpus: list[HostGpu], installed: str, build: str
) -> None:
    assert choose_build(gpus, installed)[0] == build


def test_gpus_that_no_torch_serves_are_named() -> None:
    with pytest.raises(MotleyError, match=r"ecetesla0: Tesla P4 \(6\.1\).*new: .*\(12\.0\)"):
        choose_build([P4, BLACKWELL], "2.15.0")
