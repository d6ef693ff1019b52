"""Another tool's environment: its variables are left out or refused by name, and nothing hangs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import LIMIT_S, ROOT, environment, venv

from motley.errors import MotleyError
from motley.launch.world import check_alone
from motley.train.command_line import training_parser

CASES = Path(__file__).parent / "bashrc"
SYSTEM_PYTHON = Path(sys.executable).resolve()
BEGUN_BY_HAND = [
    *(f"plots/{name}.py" for name in (
        "plot_baselines", "plot_gpu", "plot_runs", "plot_timeline", "plot_training", "publish",
        "report", "verdict", "watch")),
    *(f"torch_dist/{name}.py" for name in (
        "baseline_measure", "export", "infer_vit", "plan_vit", "verify")),
]  # fmt: skip


def entry(*words: object, **extra: str) -> "subprocess.CompletedProcess[str]":
    own = environment(MOTLEY_VENV=str(venv()), **extra)
    return subprocess.run(
        ["./entry_cn.sh", *map(str, words)], cwd=ROOT, env=own, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip


def variables_of(name: str, home: Path) -> dict[str, str]:
    """Return what a .bashrc of the cases exports."""
    words = (CASES / name).read_text().partition("#")[0].removeprefix("export ").strip()
    variable, _, value = words.partition("=")
    return {variable: value.replace("$HOME", str(home))}


def test_a_foreign_numpy_comes_after_the_environments_own(tmp_path: Path) -> None:
    shutil.copytree(CASES / "ros", tmp_path / "ros")
    (tmp_path / "ros" / "only_there.py").write_text("")
    script = tmp_path / "say.py"
    script.write_text("import numpy, only_there; print(numpy.__file__)")
    done = entry(script, **variables_of("pythonpath", tmp_path))
    assert done.returncode == 0 and str(venv()) in done.stdout, done.stderr
    assert f"has {tmp_path}/ros/numpy.py, which are also in the environment" in done.stderr
    assert "only_there" not in done.stderr


def test_another_pythons_home_is_named_and_left_out(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import sys; print(sys.prefix)")
    done = entry(script, **variables_of("pythonhome", tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{venv()}\n"), done.stderr
    assert f"PYTHONHOME=/usr/lib/python3.8 on {os.uname().nodename} is ignored" in done.stderr


def test_an_import_that_fails_names_the_host(tmp_path: Path) -> None:
    shutil.copy(CASES / "ros" / "numpy.py", tmp_path)
    script = tmp_path / "say.py"
    script.write_text("import numpy")
    done = entry(script)
    assert done.returncode == 1
    words = f"cannot be imported on {os.uname().nodename}"
    assert words in done.stderr and "numpy of another Python" in done.stderr


def test_another_launchers_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training_parser("test").parse_args(["--local_rank=0"])
    assert "--local_rank comes from another launcher" in capsys.readouterr().err
    with pytest.raises(MotleyError, match="WORLD_SIZE=2, but this process finds no other rank"):
        check_alone(1, {"RANK": "0", "WORLD_SIZE": "2"})
    check_alone(2, {"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.mpi
def test_variables_of_a_slurm_job_that_is_over_are_left_out(tmp_path: Path) -> None:
    for each in ("mpiexec", "ompirun_wrapper", "prterun"):
        (tmp_path / each).symlink_to(venv() / "bin" / each)
    shutil.copy(ROOT / "setup/launcher/mpirun.sh", tmp_path / "mpirun")
    left = {"SLURM_JOB_ID": "17", "SLURM_JOBID": "17", "SLURM_NODELIST": "n[1-2]",
            "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NNODES": "2"}  # fmt: skip
    done = subprocess.run(
        ["sh", tmp_path / "mpirun", "--hostfile", "hosts.txt", "-np", "2", "echo", "hello"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT,
        env=environment(**left),
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "hello\nhello\n", done.stderr
    assert "SLURM_JOB_ID is 17" in done.stderr


@pytest.mark.parametrize("path", BEGUN_BY_HAND)
def test_scripts_begun_by_hand_find_the_environment_first(path: str) -> None:
    lines = (ROOT / path).read_text().splitlines()
    first = next(line for line in lines if line.startswith(("import ", "from ")))
    assert first.startswith("import own_python")


@pytest.mark.parametrize("path", ["plots/verdict.py", "torch_dist/verify.py"])
def test_the_systems_python_hands_over_to_the_environments(path: str) -> None:
    own = environment(MOTLEY_VENV=str(venv()))
    own.pop("PYTHONPATH", None)
    done = subprocess.run(
        [SYSTEM_PYTHON, path, "-h"], cwd=ROOT, env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


@pytest.mark.parametrize("script", ["entry_cn.sh", "setup/make_env.sh", "setup/test_mpi.sh"])
@pytest.mark.parametrize("mark", ":,")
def test_a_folder_whose_name_separates_folders_is_refused(
    script: str, mark: str, tmp_path: Path
) -> None:
    root = tmp_path / f"my{mark}copy"
    (root / "setup").mkdir(parents=True)
    for name in ("door.sh", script.removeprefix("setup/")):
        if (ROOT / "setup" / name).exists():
            shutil.copy(ROOT / "setup" / name, root / "setup")
    if script == "entry_cn.sh":
        shutil.copy(ROOT / script, root)
    done = subprocess.run(
        ["bash", root / script], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 2 and "give it another name" in done.stderr
