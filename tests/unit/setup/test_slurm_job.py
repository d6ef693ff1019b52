"""What would not be one word in a batch script, or no number of anything, is refused."""

import pytest
import slurm_job

from motley.cluster.partitions import Partition
from motley.errors import MotleyError

PLACE = Partition("gpu", True, True, 4, 16, 2, None, None)


def written(*words: str) -> str:
    options = slurm_job.parse([*words, "./entry_cn.sh", "--run", "a.b_c-1"])
    return slurm_job.text_of(slurm_job.plan(options, [PLACE]))


def test_a_place_with_spaces_is_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job.cn, "ROOT", slurm_job.cn.ROOT / "my lab")
    script = written("--account", "team-1")
    assert f'--output="{slurm_job.cn.ROOT}/logs/a.b_c-1.%j.out"\n' in script
    assert f"cd '{slurm_job.cn.ROOT}'\n" in script and "--account=team-1\n" in script


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", "-1"), "--gpus -1 is less than 0"),
        (("--nodes", "0"), "--nodes 0 is less than 1"),
        (("--account", "a\n#SBATCH --wrap=x"), "--account"),
        (("--mpi", "none; rm -rf /"), "--mpi"),
        (("--time", "soon"), "no time of Slurm's"),
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
