"""What would not be one word in a batch script, or no number of anything, is refused."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import matrices  # noqa: F401  # what forks would import
import pytest
from forked import run_script

from motley.cluster.hostfile import Partition
from motley.errors import MotleyError
from motley.provision import slurm_job
from motley.provision.slurm_job import Array

PLACE = Partition("gpu", True, True, 4, 16, 2, None, None)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What measures is asked in a fork, not in a Python that imports torch first."""

    def run(words: Sequence[str], *_: object) -> subprocess.CompletedProcess[str]:
        return run_script(*words[1:])

    monkeypatch.setattr(slurm_job, "run_child", run)


def written(*words: str) -> str:
    options = slurm_job.parse([*words, "./entry_cn.sh", "--run", "a.b_c-1"])
    return slurm_job.make_script(slurm_job.plan(options, [PLACE]))


def test_a_place_with_spaces_is_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "PLACE", slurm_job.PLACE / "my lab")
    script = written("--account", "team-1")
    assert f'--output="{slurm_job.PLACE}/logs/a.b_c-1.%j.out"\n' in script
    assert f"cd '{slurm_job.PLACE}'\n" in script and "--account=team-1\n" in script


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", "-1"), "--gpus -1 is below 0"),
        (("--nodes", "0"), "--nodes 0 is below 1"),
        (("--account", "a\n#SBATCH --wrap=x"), "--account"),
        (("--mpi", "none; rm -rf /"), "--mpi"),
        (("--time", "soon"), "not a time that Slurm accepts"),
        (("--mem", "4G\n#SBATCH --wrap=x"), "--mem"),
        (("--sbatch", "a\nb"), "--sbatch"),
        (("--run-before", "true\nfalse"), "--run-before"),
    ],
)
def test_what_is_no_number_or_word_is_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        written(*words)


@pytest.mark.parametrize("name", ["my run", "a\nb", "$(id)", "ä"])
def test_a_run_whose_name_is_not_a_word_is_refused(name: str) -> None:
    options = slurm_job.parse(["./entry_cn.sh", "--run", name])
    with pytest.raises(MotleyError, match="--run, which names the job"):
        slurm_job.plan(options, [PLACE])


def test_no_gpus_are_as_many_as_there_are_asked_for() -> None:
    assert "--gpus-per-node=2\n" in written() and "gpus-per-node" not in written("--gpus", "0")


def test_other_options_of_sbatch_and_commands_stand_before_srun() -> None:
    script = written(
        "--mem", "64G", "--qos", "long", "--constraint", "a100&[r1|r2]", "--gres", "gpu:a100:2",
        "--exclude", "node[1-3,7]", "--sbatch=--mail-type=END", "--sbatch=--exclusive",
        "--run-before", "module load cuda/12.4", "--run-before", "source ~/lab.sh",
    )  # fmt: skip
    head, _, rest = script.partition("\nset -uo pipefail")
    for request in ("mem=64G", "qos=long", "constraint=a100&[r1|r2]", "gres=gpu:a100:2",
                    "exclude=node[1-3,7]", "mail-type=END", "exclusive"):  # fmt: skip
        assert f"\n#SBATCH --{request}\n" in head
    assert "\nmodule load cuda/12.4\nsource ~/lab.sh\nsrun " in rest


def test_a_dry_run_needs_no_slurm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    line = ["--gpus", "4", "--nodes", "2", "./entry_cn.sh", "--run", "a"]
    assert slurm_job.main(["--dry-run", *line]) == 0
    printed = capsys.readouterr()
    assert "this machine has no Slurm" in printed.err and "#SBATCH --partition" not in printed.out
    assert "cpus-per-task" not in printed.out
    assert "#SBATCH --nodes=2\n" in printed.out and "#SBATCH --gpus-per-node=4\n" in printed.out
    with pytest.raises(MotleyError, match="this machine has no Slurm"):
        slurm_job.main(line)


def in_array(folder: Path, *words: str) -> str:
    matrix = folder / "some.toml"
    matrix.write_text('[matrix]\nstrategy = ["ddp", "fsdp"]\n')
    line = ("torch_dist/baseline_measure.py", "--matrix", str(matrix), "--out", str(folder / "out"))
    options = slurm_job.parse(["--array", *words, *line, "--repeats", "2", "--", "--lr", "1e-3"])
    return slurm_job.make_script(slurm_job.plan(options, [PLACE]))


def test_each_cell_of_a_matrix_is_a_task(tmp_path: Path) -> None:
    script = in_array(tmp_path, "--nodes", "2", "--at-once", "2")
    assert "#SBATCH --array=0-2%2\n" in script and "/logs/out.%A_%a.out" in script
    assert "#SBATCH --time=0:21:00\n" in script, "two runs of 600 s, and what is around them"
    assert "--nodes 2x2 --mpirun 'srun --mpi=none --kill-on-bad-exit=0'" in script
    assert script.count('--task "$SLURM_ARRAY_TASK_ID" -- --lr 1e-3\n') == 1
    assert "USR2" not in script, "a cell is measured from its beginning"
    assert (tmp_path / "out" / "matrix.json").exists()


def test_a_dry_run_makes_no_folder(tmp_path: Path) -> None:
    assert "--array=0-2\n" in in_array(tmp_path, "--dry-run") and not (tmp_path / "out").exists()


def test_tasks_are_written_as_sbatch_takes_them() -> None:
    array = Array((), (), (0, 1, 2, 5, 7, 8), 60.0, Path())
    assert array.numbers(None) == "0-2,5,7-8" and array.numbers(3) == "0-2,5,7-8%3"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--array ./entry_cn.sh", "--array runs torch_dist/baseline_measure.py"),
        ("--array --at-once 0 x", "--at-once 0 is below 1"),
        ("--array --container . x", "does not apply to --array"),
        ("--array torch_dist/baseline_measure.py --matrix stron", "cannot measure this matrix"),
    ],
)
def test_what_is_no_array_is_refused(line: str, says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        slurm_job.plan(slurm_job.parse(line.split()), [PLACE])
