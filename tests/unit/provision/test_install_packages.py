"""An environment is filled by uv as pip would fill it, and by pip where uv cannot be had."""

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import install_packages
import pytest
from install_packages import BUILDS, Log, pip_settings, steps, uv_command, uv_environment
from lab_wheels import make_wheels
from project import copy_repository

PIP_CONF = """
[global]
index-url = https://not.this/simple
trusted-host = one.host two.host:8080
[install]
index-url = https://mirror.lab/simple
extra-index-url =
    https://first.lab/simple
    https://second.lab/simple
[freeze]
index-url = https://nor.this/simple
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that is configured by file and by variables."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(PIP_CONF)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/some/wheels /more/wheels")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "variable.host")
    monkeypatch.setenv("PIP_CERT", "/lab/ca.pem")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "60")


@pytest.mark.usefixtures("configured")
def test_uv_hears_of_what_pip_is_configured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = pip_settings()
    heard = uv_environment(settings, {"HOME": "/home/me", "UV_HTTP_TIMEOUT": "9"})
    assert heard["UV_DEFAULT_INDEX"] == "https://mirror.lab/simple"
    assert heard["UV_INDEX"] == "https://first.lab/simple https://second.lab/simple"
    assert heard["UV_FIND_LINKS"] == "/some/wheels,/more/wheels"
    assert heard["UV_INSECURE_HOST"] == "variable.host"
    assert heard["SSL_CERT_FILE"] == "/lab/ca.pem"
    assert heard["HOME"] == "/home/me" and heard["UV_HTTP_TIMEOUT"] == "9"
    assert "--no-index" not in uv_command(["-r", "a.txt"], settings)
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    settings = pip_settings()
    for words in (["-r", "a.txt"], ["--no-index", "-r", "a.txt"]):
        assert uv_command(words, settings).count("--no-index") == 1


def test_an_index_that_is_named_is_used_alone() -> None:
    words = uv_command(["--index-url", "https://named", "torch"], {})
    assert words[-3:] == ["--default-index", "https://named", "torch"]


def test_torch_comes_from_its_build_and_a_lock_may() -> None:
    given = {"requirements": [Path("r.txt")], "lock": None, "wheels": None, "torch": "cu126"}
    lines = [" ".join(words) for words in steps(Namespace(**given))]
    assert lines[0] == "--upgrade pip setuptools wheel" and lines[2] == "-r r.txt"
    assert lines[1].startswith(f"--force-reinstall --index-url {BUILDS}cu126 torch>=")
    locked = [" ".join(words) for words in steps(Namespace(**given | {"lock": Path("l.lock")}))]
    assert locked[1] == f"-r l.lock --extra-index-url {BUILDS}cu126"
    offline = list(steps(Namespace(**given | {"torch": None, "wheels": Path("w")})))
    assert [words[:3] for words in offline] == [["--no-index", "--find-links", "w"]] * 2


def test_a_long_command_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install_packages, "EVERY_S", 0.2)
    log = Log(tmp_path / "log")
    assert log.run(["sh", "-c", "echo half; sleep 0.5"])
    assert not log.run(["false"])
    assert capsys.readouterr().out == "  0 s: half\n" * 2


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of a few packages, and their requirements.lock."""
    folder = tmp_path_factory.mktemp("parts")
    make_wheels(folder, ("torch", "timm", "packaging", "wheel"))
    return folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository where an environment can be made."""
    folder = tmp_path_factory.mktemp("clone")
    copy_repository(folder)
    return folder


def make_env(
    clone: Path, venv: Path, *words: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Make an environment with the Python that runs the tests."""
    return subprocess.run(
        ["bash", clone / "setup/make_env.sh", *words], text=True, capture_output=True, check=False,
        env=os.environ | {"MOTLEY_VENV": str(venv), "PYTHON": sys.executable} | variables,
    )  # fmt: skip


def check(venv: Path, lock: Path) -> None:
    """The environment has what the lock says, pip, MPI and this project, and nothing else."""
    assert sorted((venv / "requirements.lock").read_text().lower().split()) == sorted(
        lock.read_text().lower().split()
    )
    listed = subprocess.check_output([venv / "bin/python", "-m", "pip", "list"], text=True)
    names = {line.split()[0] for line in listed.splitlines()}
    assert {"pip", "motley-train"} <= names and "uv" not in names
    assert not (venv / "uv/cache").exists()
    subprocess.run([venv / "bin/mpirun", "--version"], check=True, capture_output=True)


@pytest.mark.turns("an environment is filled")
def test_uv_makes_an_environment_from_wheels_once_all_are_there(
    clone: Path, parts: Path, tmp_path: Path
) -> None:
    venv, lock, wrong = tmp_path / "venv", parts / "requirements.lock", tmp_path / "wrong.lock"
    wrong.write_text(lock.read_text() + "nowhere-to-be-had==1.0\n")
    done = make_env(clone, venv, "--wheels", parts, "--lock", wrong)
    assert done.returncode == 1 and "nowhere-to-be-had" in done.stderr
    assert f"motley: that failed; all of its output is in {venv}/install.log" in done.stderr
    (venv / "uv/bin/uv").write_text("")  # as if it had been cut short there
    done = make_env(clone, venv, "--wheels", parts, "--lock", lock)
    assert done.returncode == 0 and "environment: ready" in done.stdout, done.stderr
    assert "making" not in done.stdout and "pip installs" not in done.stdout
    check(venv, lock)
    installers = venv.glob("lib/python*/site-packages/*.dist-info/INSTALLER")
    assert {path.read_text().strip() for path in installers} == {"pip", "uv"}  # pip's is pip's own
    linked = [path for path in venv.rglob("*.py") if path.stat().st_nlink > 1]
    assert not linked  # nobody else's files
    assert "is current" in make_env(clone, venv, "--lock", lock).stdout


@pytest.mark.turns("an environment is filled")
def test_pip_makes_the_same_where_uv_cannot_be_had(
    clone: Path, parts: Path, tmp_path: Path
) -> None:
    venv, wheels, lock = tmp_path / "venv", tmp_path / "wheels", parts / "requirements.lock"
    shutil.copytree(parts, wheels, ignore=shutil.ignore_patterns("uv-*"))
    done = make_env(clone, venv, "--wheels", wheels, "--lock", lock)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "pip installs" in line]
    assert len(said) == 1 and "No matching distribution found for uv" in said[0]
    check(venv, lock)


@pytest.mark.turns("an environment is filled")
def test_uv_installs_from_where_pip_is_configured_to(
    clone: Path, parts: Path, tmp_path: Path
) -> None:
    venv, lock, wheels = tmp_path / "venv", parts / "requirements.lock", tmp_path / "wheels"
    shutil.copytree(parts, wheels)
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels]
    subprocess.run([*download, "pip", "wheel"], check=True)
    done = make_env(clone, venv, "--lock", lock, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    assert done.returncode == 0 and "pip installs" not in done.stdout, done.stderr
    check(venv, lock)
