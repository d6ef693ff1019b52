"""Bad input, as an impatient user would type it: one clear line, and nothing half-written."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from jobs import Done, Jobs
from pictures import picture_folder
from project import DDP, LIMIT_S, ROOT, ZERO, environment

pytestmark = pytest.mark.mpi


def refused(jobs: Jobs, *words: object, ranks: int = 1) -> str:
    """The one line of a job that ends with an error before it made a run."""
    return the_line_of(jobs.fork(ranks, *words, "--logs", jobs.logs))


def the_line_of(done: Done) -> str:
    """What a job that failed says to its user."""
    assert done.code != 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert len(lines) == 1, done.output
    assert "Traceback" not in done.output
    return lines[0]


def test_shares_that_do_not_match_the_ranks(jobs: Jobs) -> None:
    line = refused(jobs, DDP, "--shares", "3,2,1", ranks=2)
    assert "--shares 3,2,1 has 3 values, but 2 ranks take part" in line


def test_a_batch_smaller_than_the_ranks(jobs: Jobs) -> None:
    assert "--batch-size 1" in refused(jobs, DDP, "--batch-size", 1, ranks=2)


def test_an_unknown_host(jobs: Jobs) -> None:
    line = refused(jobs, DDP, "--hosts", "nowhere", ranks=2)
    assert "'nowhere' is not among the started hosts" in line and "give auto or all" in line


def test_an_unknown_model(jobs: Jobs) -> None:
    line = refused(jobs, DDP, "--model", "vit_base_pach16_224")
    assert "vit_base_patch16_224" in line and "nearest" in line


def test_a_missing_dataset_folder(jobs: Jobs, tmp_path: Path) -> None:
    line = refused(jobs, DDP, "--dataset", "folder", "--data-dir", tmp_path / "none", ranks=2)
    assert "needs the folders train/ and val/" in line
    assert not jobs.logs.exists(), "nothing half-written"


def test_a_truncated_image_is_fatal_or_skipped_as_asked(jobs: Jobs, tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "pictures", ("train/cat/3.png", "val/dog/1.png"))
    model = ("--model", "vit_digits", "--img-size", 16, "--batch-size", 8, "--epochs", 2)
    options = (DDP, "--dataset", "folder", "--data-dir", root, *model)
    done = jobs.fork(2, *options, "--logs", jobs.logs, "--run", "fatal")
    assert done.code != 0
    assert "train/cat/3.png" in done.output and "--bad-samples skip" in done.output
    run = jobs.train(2, *options[:1], "skips", *options[1:], "--bad-images", "skip")
    named = {event["sample"] for event in run.events if event["event"] == "unreadable"}
    assert len(named) == 2 and any("val/dog/1.png" in name for name in named)
    assert "2 samples could not be read" in run.done.output
    epochs = [json.loads(line) for line in (run.folder / "epochs.jsonl").open()]
    assert [epoch["samples"] for epoch in epochs] == [7, 7]


def test_a_metric_that_nobody_has_or_of_unknown_direction(jobs: Jobs, tmp_path: Path) -> None:
    line = refused(jobs, DDP, "--keep-best", "top2", ranks=2)
    assert (
        "metric top2 (nearest: top" in line
        and "name one of top1, top5, loss with --keep-best" in line
    )
    (tmp_path / "mine.py").write_text(
        (ROOT / "examples/my_task.py").read_text()
        + "\n    def summary(self, means):\n        return {**means, 'skill': 1.0}\n"
    )
    words = ("--task", tmp_path / "mine.py", "--keep-best", "skill", "--stop-after", 1)
    assert "write --keep-best skill:max or --keep-best skill:min" in refused(jobs, DDP, *words)


OWN = ("--task", "tests/support/own_training.py")


@pytest.mark.turns
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            (DDP, "--opt-kwargs", "beta=0.9,0.95"),
            "has no argument beta (nearest: betas); its arguments are betas",
        ),
        ((DDP, "--opt-kwargs", "lr=1"), "write --lr 1 instead"),
        ((DDP, "--opt-kwargs", "betas=0.9,1.5"), "Invalid beta parameter at index 1"),
        ((DDP, "--momentum", 0.5), "--opt adamw has no momentum; leave it out"),
        ((DDP, "--clip-mode", "agc"), "no effect without --clip-grad; add --clip-grad 0.01"),
        (
            (DDP, "--strategy", "fsdp", "--clip-grad", 1, "--clip-mode", "agc"),
            "--clip-mode agc needs whole parameters",
        ),
        (
            (ZERO, "--stage", 2, "--clip-grad", 1, "--clip-mode", "value"),
            "--clip-mode value: at ZeRO stage 2, DeepSpeed clips only by the norm",
        ),
        ((DDP, *OWN, "--opt", "sgd"), "--opt has no effect, since optimizer() of Lines creates"),
        ((DDP, *OWN, "--strategy", "fsdp"), "after_evaluation() of Lines needs the whole model"),
    ],
)
def test_an_optimization_that_cannot_be(jobs: Jobs, words: tuple[object, ...], says: str) -> None:
    assert says in refused(jobs, *words)


def test_an_unwritable_logs_folder(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = jobs.fork(2, DDP, "--logs", tmp_path / "file")
    assert done.code != 0 and "choose another place with --logs DIR" in done.output


def test_a_run_that_exists_or_is_in_use(jobs: Jobs) -> None:
    jobs.train(1, DDP, "mine", "--max-steps", 2)
    assert "exists; continue it with --resume auto" in refused(jobs, DDP, "--run", "mine")
    holder = jobs.start(1, DDP, "--logs", jobs.logs, "--run", "busy", "--epochs", 900)
    assert holder.stdout is not None
    while "step 1/" not in holder.stdout.readline():
        assert holder.poll() is None
    line = refused(jobs, DDP, "--run", "busy", "--resume", "auto")
    assert re.search(r"is in use by another run, by process \d+ on \S+ since 20\d\d-", line), line


def test_resuming_what_is_not_there_or_another_model(jobs: Jobs, tmp_path: Path) -> None:
    assert "there is no checkpoint" in refused(jobs, DDP, "--resume", tmp_path / "none")
    jobs.train(1, DDP, "mine", "--max-steps", 2)
    line = refused(jobs, DDP, "--run", "mine", "--resume", "auto", "--img-size", 16)
    assert "--img-size 16 (the checkpoint: 8)" in line
    run = json.loads((jobs.logs / "mine" / "run.json").read_text())
    assert run["status"] == "finished" and run["result"]["top1"] > 0, "a refusal changes nothing"


def test_a_loss_that_is_no_number_names_step_rank_and_samples(jobs: Jobs) -> None:
    words = ("--lr", "1e30", "--warmup-epochs", 0, "--logs", jobs.logs)
    line = the_line_of(jobs.fork(2, DDP, *words))
    assert "is not finite (sample indices " in line and "step " in line and "rank " in line


@pytest.mark.turns
@pytest.mark.parametrize(
    ("script", "options"),
    [(DDP, ()), (DDP, ("--strategy", "fsdp")), (ZERO, ("--stage", 3))],
    ids=["DDP", "FSDP", "DeepSpeed 3"],
)
def test_a_sample_that_is_no_number_is_named_by_the_rank_that_has_it(
    jobs: Jobs, tmp_path: Path, script: str, options: tuple[object, ...]
) -> None:
    """The other rank has fine losses, and a gradient that is not."""
    task = (ROOT / "examples" / "my_task.py").read_text()
    path = tmp_path / "mine.py"
    path.write_text(task.replace('return {"x": x', 'return {"x": x / (item != 137)'))
    words = ("--task", path, "--batch-size", 4000, "--epochs", 1, "--shares", "2,1", *options)
    line = refused(jobs, script, *words, ranks=2)
    assert re.search(r"the loss of 1 of this rank's \d+ samples is not finite", line), line
    assert (
        "(sample indices 137): 'x' is not finite either in the data of 137; repair or remove"
        in line
    )


def test_a_held_out_sample_that_is_no_number_is_named(jobs: Jobs, tmp_path: Path) -> None:
    task = (ROOT / "examples" / "my_task.py").read_text()
    path = tmp_path / "mine.py"
    path.write_text(task.replace('return {"x": x', 'return {"x": x / (item != 20_137)'))
    words = ("--task", path, "--batch-size", 4000, "--epochs", 2, "--shares", "2,1")
    line = refused(jobs, DDP, *words, ranks=2)
    assert (
        "scores of held-out samples are not finite: 'x' is not finite either in the data of 137;"
        in line
    )


NO_WEIGHT = """    def weights(self, batch):
        return torch.zeros(len(batch["y"]))"""
SCALED = """class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return functional.gelu(self.scale * x)


@dataclass"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ("else range(20_000)", "else []"),
            "Sums has no training samples: data(held_out=False) returns none",
        ),
        (("range(20_000, 21_000)", "[]"), "no held-out samples: data(held_out=True) returns none"),
        ((".sum(dim=1)", ".sum(dim=1)[:60]"), "shape (60,) for 64 samples"),
        (
            (
                "    def losses",
                "    def costs(self, indices):\n        return [0.0]\n\n    def losses",
            ),
            "costs() of Sums returns 1 numbers for 128 samples, from 0 to 0. Return one number",
        ),
        (
            ("    def losses", f"{NO_WEIGHT}\n\n    def losses"),
            "held-out samples are all 0, so a mean over them has no value; let weights() of Sums",
        ),
    ],
)
def test_a_task_with_nothing_to_learn_or_too_few_losses(
    jobs: Jobs, tmp_path: Path, change: tuple[str, str], says: str
) -> None:
    task = (ROOT / "examples" / "my_task.py").read_text()
    path = tmp_path / "mine.py"
    path.write_text(task.replace(*change))
    words = ("--task", path, "--shares", "1,1", "--max-steps", 1)
    assert says in refused(jobs, DDP, *words, ranks=2)


def test_a_parameter_without_dimensions_cannot_be_sharded(jobs: Jobs, tmp_path: Path) -> None:
    task = (ROOT / "examples" / "my_task.py").read_text()
    path = tmp_path / "mine.py"
    path.write_text(task.replace("nn.GELU()", "Scaled()").replace("@dataclass", SCALED))
    line = refused(jobs, DDP, "--task", path, "--strategy", "fsdp", ranks=2)
    assert "has no dimension: give it the shape [1]" in line


def test_an_option_of_another_task(jobs: Jobs) -> None:
    line = refused(jobs, DDP, "--task", "text", "--bn-group", 16)
    assert "unknown option --bn-group: it belongs to --task image" in line


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        (
            DDP,
            ("--strategy", "fsdp", "--wire", "powersgd:4"),
            "--wire powersgd:4 does not work with this strategy: FSDP gathers",
        ),
        (DDP, ("--offload", "parameters"), "add --strategy fsdp"),
        (ZERO, ("--offload", "optimizer"), "so its memory holds everything already"),
        (ZERO, ("--stage", "1", "--opt", "lamb"), "computes with whole tensors"),
        (DDP, ("--grad-checkpointing", "mpl"), "nearest: mlp"),
    ],
)
def test_what_a_strategy_cannot_do(
    jobs: Jobs, script: str, options: tuple[str, ...], says: str
) -> None:
    assert says in refused(jobs, script, *options)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"micro_batch_per_gpu": 4}', "nearest: train_micro_batch_size_per_gpu"),
        (
            '{"zero_optimization": {"stag": 1}}',
            "zero_optimization.stag is unknown, or not supported by Motley (nearest: stage",
        ),
        ('{"optimizer": {"type": "Adam"}}', "--opt, --lr and --weight-decay decides the key"),
        ('{"train_micro_batch_size_per_gpu": 3}', "the plan gives rank 0 128"),
        ('{"zero_optimization": {"stage": 4}}', "stage 4 is not one of"),
        ("{", "not a readable JSON file"),
    ],
)
def test_a_wrong_deepspeed_configuration(
    jobs: Jobs, tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(content)
    assert says in refused(jobs, ZERO, "--deepspeed-config", path, "--shares", "1")


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (None, "hosts.txt does not exist; create it with one host per line, as hosts.example.txt"),
        ("", "hosts.txt names no host"),
        ("-oProxyCommand=touch${IFS}hacked slots=1\n", "line 1: '-oProxyCommand"),
        ("$(touch${IFS}hacked) slots=1\n", "is not a host name"),
    ],
)
def test_a_wrong_hosts_file_stops_before_anything_is_launched(
    tmp_path: Path, hosts: str | None, says: str
) -> None:
    path = tmp_path / "hosts.txt"
    if hosts is not None:
        path.write_text(hosts)
    done = subprocess.run(
        ["bash", ROOT / "setup" / "quickstart.sh", "--hostfile", path, "--logs", tmp_path / "logs"],
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=LIMIT_S,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert not (tmp_path / "hacked").exists() and not (tmp_path / "logs").exists()
