"""Environments of real labs: tools that hang, users without a name."""

import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from project import LIMIT_S, ROOT, environment

from motley.cluster import gpus
from motley.cluster.account import (
    cache_folder,
    cache_note,
    home_folder,
    is_lasting,
    temporary_note,
    user_name,
)
from motley.cluster.login import read_login
from motley.errors import MotleyError
from motley.launch.ranks import secret
from motley.membership import away
from motley.provision.passwordless_ssh import own_key
from motley.provision.test_cn_connection import judge_keys

CASES = Path(__file__).parent


def test_nvidia_smi_that_hangs_has_a_time_limit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = CASES / "nvidia_smi" / "hang"
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "NVIDIA_SMI_LIMIT_S", 0.5)
    monkeypatch.setattr(gpus.LimitedSmi, "has_timed_out", False)
    begun = time.monotonic()
    with gpus.GpuSampler(gputil_every_s=0) as sampler:
        sampler.sample()
        sampler.sample()
    assert time.monotonic() - begun < 5
    assert capfd.readouterr().err.count("nvidia-smi") == 1


# Load, memory in all and in use (MiB), temperature; no device; and what is printed.
ANSWERS = {
    "ok": ([(0.12, 8192, 100, 40)], ""),
    "comma_name": ([(0.12, 8192, 100, 40)], ""),
    "err": ([(None, 8192, None, None)], ""),
    "na": ([(None, 8192, None, None)], ""),
    "requires": ([(None, None, None, None)], ""),
    "unknown": ([(None, 8192, 100, None)], ""),
    "failed": ([], "status 9 (NVIDIA-SMI has failed because"),
    "lost": ([], "status 15 (Unable to determine the device handle"),
    "mismatch": ([], "status 18 (Failed to initialize NVML: Driver/library version mismatch)"),
    "none": ([], ""),
    "garbage": ([], ""),
    "noexec": ([], ""),
}


@pytest.mark.parametrize(("name", "answer"), ANSWERS.items())
def test_what_nvidia_smi_does_not_know_is_unknown_and_a_failure_is_named(
    name: str,
    answer: tuple[list[tuple[float | None, ...]], str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", f"{CASES / 'nvidia_smi' / name}:/usr/bin:/bin")
    monkeypatch.setattr(gpus, "_nvml_devices", lambda of_gputil: None)  # a machine without NVML
    monkeypatch.setattr(gpus.LimitedSmi, "has_timed_out", False)
    monkeypatch.setattr(gpus.LimitedSmi, "has_failed", False)
    with gpus.GpuSampler(gputil_every_s=0) as sampler:
        sampler.sample()
        found = sampler.sample()
    expected, said = answer
    assert expected == [
        (each.load, each.memory_total_mib, each.memory_used_mib, each.temperature_c)
        for each in found
    ]
    if name == "comma_name":
        assert found[0].name == "NVIDIA Weird,Card"
    errors = capfd.readouterr().err
    assert said in errors and errors.count("nvidia-smi") == bool(said)


def test_every_stand_in_has_its_right_result() -> None:
    assert {path.name for path in (CASES / "nvidia_smi").iterdir()} == {*ANSWERS, "hang"}


def test_user_without_a_name_is_asked_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", fail)
    assert away._on_gpu() == ""


def test_a_user_without_a_name_and_a_home_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", fail)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "MOTLEY_SECRET"):
        monkeypatch.delenv(name, raising=False)
    assert user_name() == str(os.getuid())
    no_home = r"your home folder on .* is unknown: HOME is not set.*export HOME="
    for asked in (home_folder, lambda: read_login("other"), own_key, lambda: secret({})):
        with pytest.raises(MotleyError, match=no_home):
            asked()
    with pytest.raises(MotleyError, match=no_home):
        [*judge_keys([])]


def test_letters_that_the_output_cannot_show_end_nothing(tmp_path: Path) -> None:
    logs = tmp_path / "\u00e9t\u00e9"
    variables = environment(
        PYTHONIOENCODING="ascii", PYTHONPATH=str(ROOT / "src"), OMP_NUM_THREADS="1"
    )

    def ends(*words: object) -> str:
        done = subprocess.run(
            [str(word) for word in words], cwd=ROOT, env=variables, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == 0 and "Error" not in said, said
        return said

    said = ends("./entry_cn.sh", "--max-steps", 2, "--logs", logs, "--run", "\u00e0")
    assert "\\xe9t\\xe9/\\xe0" in said
    for script in ("plots/plot_training.py", "plots/verdict.py", "torch_dist/verify.py"):
        assert "\\xe0" in ends(sys.executable, script, logs / "\u00e0")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small disk with some options."""
    if os.getuid() != 0:
        pytest.skip("only root may mount a disk")
    mounted = list[Path]()

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(
    ("options", "files", "said"),
    [("size=64k", 16, "is full (0 KiB are free)"), ("nr_inodes=2", 0, "has inodes for only")],
)
def test_full_temporary_folder_is_named_before_mpi_begins(
    disk: Callable[[str], Path], tmp_path: Path, options: str, files: int, said: str
) -> None:
    folder = disk(options)
    (folder / "large").write_bytes(bytes(4096 * files))
    note = temporary_note({"TMPDIR": str(folder)})
    assert said in note and str(folder) in note and "export TMPDIR=" in note
    script = tmp_path / "nothing.py"
    script.write_text("")
    done = subprocess.run(
        [ROOT / "entry_cn.sh", script], cwd=ROOT, env=environment(TMPDIR=str(folder)),
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and f"motley: {note}" in done.stderr, done.stderr
    assert temporary_note({"TMPDIR": "/var/tmp"}) == ""
    assert "No such file" in temporary_note({"TMPDIR": str(folder / "none")})


def test_caches_are_where_compiled_code_can_be_loaded(
    disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = disk("noexec")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert cache_folder().parent != folder and is_lasting(cache_folder())
    assert f"no program can be run from {folder}" in cache_note()


def test_cache_folder_of_another_user_is_named_and_replaced_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may give a folder away")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache_note() == ""
    usual = cache_folder()
    os.chown(usual, 65534, 65534)
    assert cache_folder() == cache_folder() != usual  # what is measured is found again
    assert is_lasting(cache_folder())
    assert "belongs to the user of number 65534" in cache_note() and str(usual) in cache_note()
    assert len([*tmp_path.iterdir()]) == 2
