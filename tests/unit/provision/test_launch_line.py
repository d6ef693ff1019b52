"""The line of keep_training.sh, without some of its hosts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.errors import MotleyError
from motley.provision.keep_returns import HostAnswers
from motley.provision.keep_training import Keeper, Stop
from motley.provision.launch_line import LaunchLine

HOSTS = "a slots=2\nb\nc slots=2\n"


def parsed(folder: Path, *own: str, ranks: str = "5") -> LaunchLine:
    (folder / "hosts.txt").write_text(HOSTS)
    return LaunchLine.parse(
        ["mpirun", "-np", ranks, "--hostfile", str(folder / "hosts.txt"), "./entry_cn.sh", *own]
    )


def test_a_hosts_ranks_and_what_is_said_of_each_go_with_it(tmp_path: Path) -> None:
    own = ("torch_dist/train_vit.py", "--shares", "5,4,3,2,1", "--precision=fp32", "--lr", "1")
    line = parsed(tmp_path, *own).named("now")
    alive = [host for host in line.hosts if host.name != "b"]
    left = line.with_hosts(alive, tmp_path / "left.txt").resumed(True)
    assert left.words == (
        "mpirun", "-np", "4", "--hostfile", str(tmp_path / "left.txt"), "./entry_cn.sh",
        "torch_dist/train_vit.py", "--shares", "5,4,2,1", "--precision=fp32", "--lr", "1",
        "--run", "now", "--resume", "auto",
    )  # fmt: skip
    assert (tmp_path / "left.txt").read_text() == "a slots=2\nc slots=2\n"
    assert line.with_hosts(line.hosts, tmp_path / "other.txt") == line
    assert left.folder == Path("logs/now")


def test_a_script_that_is_left_out_is_named_before_its_options(tmp_path: Path) -> None:
    words = parsed(tmp_path).named("now").words
    assert words[-3:] == ("torch_dist/train_vit.py", "--run", "now")


@given(lost=st.sets(st.sampled_from("abc"), max_size=2), ranks=st.integers(1, 5))
def test_as_many_ranks_are_left_as_were_on_the_other_hosts(
    tmp_path_factory: pytest.TempPathFactory, lost: set[str], ranks: int
) -> None:
    folder = tmp_path_factory.mktemp("line")
    shares = ",".join("12345"[:ranks])
    line = parsed(folder, "train.py", "--shares", shares, ranks=str(ranks))
    left = line.with_hosts([h for h in line.hosts if h.name not in lost], folder / "left.txt")
    seats = list("aabcc")[:ranks]
    stay = [seat not in lost for seat in seats]
    assert left.words[2] == (str(sum(stay)) if lost else str(ranks))
    if ranks > 1:
        kept = ",".join(each for each, stays in zip(shares.split(","), stay, strict=True) if stays)
        assert left.words[-1] == kept


@pytest.mark.parametrize(
    "spelling",
    ["--hostfile=FILE", "-hostfile FILE", "--machinefile=FILE", "-H a:2,b,c,c", "--host a,a,b,c:2",
     "-host=a:2,b:1,c:2"],
)  # fmt: skip
def test_every_spelling_of_the_hosts_is_read(spelling: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text(HOSTS)
    words = spelling.replace("FILE", str(tmp_path / "hosts.txt")).split()
    line = LaunchLine.parse(["mpirun", "--np=5", *words, "./entry_cn.sh"])
    assert [(host.name, host.slots) for host in line.hosts] == [("a", 2), ("b", 1), ("c", 2)]
    alive = [host for host in line.hosts if host.name != "b"]
    left = line.with_hosts(alive, tmp_path / "left.txt").words
    assert left[:3] == ("mpirun", "--np", "4")
    assert left[4] == (str(tmp_path / "left.txt") if "FILE" in spelling else "a:2,c:2")


def test_nothing_is_said_of_hosts_that_were_not_asked(tmp_path: Path) -> None:
    for words, says in ((["-H", "+n0"], "no host was asked"), ([], "no host was asked"),
                        (["-H", "a"], "all hosts answer")):  # fmt: skip
        line = LaunchLine.parse(["mpirun", *words, "./entry_cn.sh"]).named("now")
        why = Keeper(line, 0, Stop())._gives_up({}, -1, HostAnswers((), {}, {}, (), {}, {}, {}))
        assert says in why


def test_hosts_of_the_hostfile_without_a_rank_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = parsed(tmp_path, "train.py", ranks="3").named("now")
    assert line.hosts_with_ranks == {"a", "b"}
    keeper = Keeper(line, 3, Stop())
    for lost, says in (
        ({"c": "dead"}, ""),
        ({"b": "dead", "c": "dead"}, "b is gone (dead); continues with 1 of 2 hosts"),
        ({"c": "dead"}, "b is back; continues with 2 of 2 hosts"),
    ):  # fmt: skip
        alive = tuple(host for host in line.hosts if host.name not in lost)
        keeper._say_who(HostAnswers(alive, lost, {}, (), {}, {}, {}))
        assert says in (said := capsys.readouterr().err) and bool(says) == bool(said)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the command to run is missing"),
        (["ls", "-l"], "'ls' does not start ranks"),
        (["mpirun", "-np", "2", "python", "x.py"], r"lacks \./entry_cn\.sh"),
        (["mpirun", "--hostfile", "/none", "./entry_cn.sh"], "/none does not exist"),
    ],
)
def test_what_is_no_training_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        LaunchLine.parse(words)


def test_a_trial_has_the_launchers_words_alone(tmp_path: Path) -> None:
    line = parsed(tmp_path, "torch_dist/train_vit.py", "--shares", "5,4,3,2,1")
    assert line.trial() == (*line.words[:6], "setup/hello_mpi.py", "--lose-one")
    for command in ("train", "run"):
        line = LaunchLine.parse(["mpirun", "-np", "2", "/env/bin/motley", command, "x.py"])
        assert line.trial() == (*line.words[:4], "hello", "--lose-one")


def test_a_line_of_the_command_motley_is_changed_as_one_of_entry_cn(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text(HOSTS)
    begin = ["mpirun", "--wdir", "/home/me/motley", "--hostfile", str(tmp_path / "hosts.txt")]
    line = LaunchLine.parse([*begin, "motley", "train", "--shares", "5,4,3,2,1"]).named("now")
    assert line.words[-2:] == ("--run", "now") and line.folder == Path("logs/now")
    left = line.with_hosts([host for host in line.hosts if host.name != "b"], tmp_path / "left")
    assert left.words == (
        *begin[:-1], str(tmp_path / "left"), "motley", "train", "--shares", "5,4,2,1", "--run",
        "now",
    )  # fmt: skip
    alone = LaunchLine.parse(["srun", "-n", "2", "motley", "train"]).named("now")
    assert alone.words == ("srun", "-n", "2", "motley", "train", "--run", "now")
    with pytest.raises(MotleyError, match=r"lacks \./entry_cn\.sh"):
        LaunchLine.parse(["mpirun", "motley", "report"])


def test_the_users_own_interval_between_checkpoints_stays(tmp_path: Path) -> None:
    assert parsed(tmp_path, "train.py").saving_every("50s").words[-2:] == ("--save-every", "50s")
    own = parsed(tmp_path, "train.py", "--save-every=9")
    assert own.saving_every("50s") is own and own.save_every == "9"


def test_a_launcher_may_have_the_name_of_its_kind() -> None:
    assert LaunchLine.parse(["/usr/bin/mpirun.openmpi", "./entry_cn.sh"]).words
    assert not LaunchLine.parse(["mpiexec.hydra", "./entry_cn.sh"]).under_slurm


def test_before_its_first_checkpoint_a_run_begins_again_where_the_user_said() -> None:
    words = ["mpirun", "./entry_cn.sh", "torch_dist/train_vit.py", "--resume", "logs/old"]
    line = LaunchLine.parse(words)
    assert line.resumed(False).words == tuple(words)
    assert line.resumed(True).words[-2:] == ("--resume", "auto")
    assert LaunchLine.parse(words[:3]).resumed(False).words[-2:] == ("--resume", "auto")
