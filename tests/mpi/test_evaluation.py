"""Evaluations when they are asked for, the best checkpoint, and the end of a run that is no longer
better: the same on any ranks."""

import csv
import json
import re
from pathlib import Path
from textwrap import indent

import pytest
from forked import run_script
from jobs import Jobs, Trained
from PIL import Image
from project import DDP, ROOT, ZERO
from sklearn.datasets import load_digits

from motley.checkpoint.read import checkpoints_at, load_checkpoint

pytestmark = pytest.mark.mpi

WORDS = ("--max-steps", 9, "--batch-size", 64, "--precision", "fp32", "--warmup-epochs", 0,
         "--eval-every", 4, "--eval-at-start", "--keep-best", "loss", "--keep", 1)  # fmt: skip
RUNS = {
    "DDP": (3, DDP, "--shares", "5,0,3"),
    "FSDP": (2, DDP, "--strategy", "fsdp", "--shares", "3,1"),
    "DeepSpeed 1": (2, ZERO, "--stage", 1, "--shares", "3,1"),
    "Local SGD": (2, DDP, "--wire", "local:1", "--shares", "3,1"),
}


def best_of(run: Trained) -> str:
    return str((run.folder / "checkpoints" / "best").readlink())


def saved(run: Trained) -> set[str]:
    return {path.name for path in (run.folder / "checkpoints").glob("step_*")}


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


@pytest.fixture(scope="module")
def alone(module_jobs: Jobs) -> Trained:
    """One rank."""
    return module_jobs.train(1, DDP, "alone", *WORDS, "--shares", "equal")


def test_evaluations_change_nothing_else(module_jobs: Jobs, alone: Trained) -> None:
    plain = module_jobs.train(1, DDP, "plain", *WORDS[:8], "--shares", "equal")
    assert plain.losses == alone.losses
    assert [each["step"] for each in plain.epochs] == [9]
    assert plain.epochs[-1]["loss"] == alone.epochs[-1]["loss"]
    before = plain.run
    words = ("--resume", plain.folder, *WORDS[:2], "--eval-at-start", "--metrics", "f1_macro")
    again = module_jobs.train(2, DDP, "plain", *words)
    assert [each["step"] for each in again.epochs] == [9, 9]
    assert again.epochs[1]["loss"] == pytest.approx(plain.epochs[0]["loss"], rel=1e-5)
    assert 0 < again.epochs[1]["f1_macro"] < 1 and again.losses == plain.losses
    result = {**again.run["result"]}
    assert result.pop("f1_macro") == again.epochs[1]["f1_macro"]
    assert result == before["result"]  # the speed of its training is still in it
    for name in ("config", "ranks", "command", "plan", "started"):
        assert again.run[name] == before[name], "the records are those of the training"


@pytest.mark.turns
@pytest.mark.parametrize("name", RUNS)
def test_they_are_those_of_one_rank(module_jobs: Jobs, alone: Trained, name: str) -> None:
    ranks, script, *options = RUNS[name]
    run = module_jobs.train(ranks, script, name, *WORDS, *options)
    for each in (alone, run):
        assert [line["step"] for line in each.epochs] == [0, 4, 8, 9]
        losses = [line["loss"] for line in each.epochs]
        assert losses == pytest.approx([line["loss"] for line in alone.epochs], rel=1e-5)
        assert best_of(each) == f"step_{each.epochs[losses.index(min(losses))]['step']:08d}"
        assert saved(each) == {best_of(each), "step_00000009"}
        assert each.run["result"]["best_score"] == min(losses)
        lines = table(each.folder / "confusion.csv")
        assert sum(int(line["samples"]) for line in lines) == 360
        right = sum(int(x["samples"]) for x in lines if x["label"] == x["predicted"])
        assert each.run["result"]["top1"] == pytest.approx(right / 360)
        classes = table(each.folder / "classes.csv")
        assert sum(int(line["correct"]) for line in classes) == right and len(classes) == 10
        assert each.run["result"]["top1"] <= each.run["result"]["top5"] <= 1
    worst = [json.loads((each.folder / "worst.json").read_text()) for each in (run, alone)]
    assert len(worst[0]) == 24
    for own, due in zip(*worst, strict=True):
        assert own["loss"] == pytest.approx(due["loss"], rel=1e-4)
    by_index = [{each["index"]: each for each in some[:20]} for some in worst]
    for index in by_index[0].keys() & by_index[1].keys():
        own, due = (some[index] for some in by_index)
        assert all(own[name] == due[name] for name in ("label", "predicted", "picture", "name"))
    assert len(by_index[0].keys() & by_index[1].keys()) >= 18
    assert worst[0][0]["loss"] == max(each["loss"] for each in worst[0])


METRICS = ("--max-steps", 4, "--batch-size", 64, "--precision", "fp32", "--warmup-epochs", 0,
           "--eval-every", 2, "--model-ema", "--metrics", "f1_macro", "auroc", "--test-crops", 5,
           "--keep-best", "night/f1_macro", "--eval-data")  # fmt: skip


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two folders of digits, one of them without some classes."""
    digits, root = load_digits(), tmp_path_factory.mktemp("sets")
    for name, numbers in (("night", range(60)), ("day", range(60, 67))):
        for number in numbers:
            folder = root / name / str(digits.target[number])
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (digits.images[number] * 15).astype("uint8")
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return f"night={root / 'night'}", f"day={root / 'day'}"


@pytest.fixture(scope="module")
def measured(module_jobs: Jobs, sets: tuple[str, str]) -> Trained:
    """One rank, with metrics."""
    return module_jobs.train(1, DDP, "measured", *METRICS, *sets, "--shares", "equal")


@pytest.mark.turns
@pytest.mark.parametrize("name", RUNS)
def test_metrics_of_all_samples_and_of_several_sets_are_those_of_one_rank(
    module_jobs: Jobs, sets: tuple[str, str], measured: Trained, name: str
) -> None:
    ranks, script, *options = RUNS[name]
    one = measured
    run = module_jobs.train(ranks, script, f"{name} of several", *METRICS, *sets, *options)
    for own, due in zip(run.epochs, one.epochs, strict=True):
        assert own["sets"] == {"night": 60, "day": 7} and own["samples"] == 360
        assert {*own} == {*due} and "ema_day/auroc" in own and "ema_f1_macro" in own
        for metric in due.keys() - {"seconds", "time", "sets"}:
            assert own[metric] == pytest.approx(due[metric], rel=1e-4), metric
    best = max(one.epochs, key=lambda each: each["night/f1_macro"])
    assert run.run["result"]["best_score"] == pytest.approx(best["night/f1_macro"])
    assert best_of(run) == f"step_{best['step']:08d}"
    words = run.done.output.splitlines()
    assert any(line.startswith("step 4, night: top-1 ") for line in words), run.done.output
    assert run.run["config"]["eval_data"] == [*sets]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in one folder, with CSV files of their classes, of several labels, and of a number."""
    digits, root = load_digits(), tmp_path_factory.mktemp("tables")
    lines: dict[str, list[str]] = {"class": [], "labels": [], "value": []}
    for number in range(150):
        pixels, digit = (digits.images[number] * 15).astype("uint8"), int(digits.target[number])
        Image.fromarray(pixels).save(root / f"{number}.png")
        several = [name for name, is_on in (("odd", digit % 2), ("large", digit > 4)) if is_on]
        for kind, label in (("class", digit), ("labels", ";".join(several)), ("value", digit / 2)):
            lines[kind].append(f"{number}.png\t{label}")
    for kind, own in lines.items():
        (root / f"{kind}.csv").write_text("\n".join(["image_id\ttarget", *own, "gone.png\t1"]))
    return root


KINDS = {
    "class": ("--class-weights", "balanced", "--balanced-sampling", "--mixup", 0.5,
              "--keep-best", "top1"),
    "labels": ("--class-weights", "balanced", "--metrics", "f1_micro", "--keep-best", "map"),
    "value": ("--value-loss", "l1", "--metrics", "spearman", "--keep-best", "r2"),
}  # fmt: skip
ALONE = {
    "class": {"top1", "top5", "loss"}, "labels": {"accuracy", "exact", "map", "f1_micro", "loss"},
    "value": {"mae", "rmse", "r2", "spearman", "loss"},
}  # fmt: skip


@pytest.mark.turns
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [
    (DDP, "--shares", "5,0,3"), (DDP, "--shares", "1,2,1", "--strategy", "fsdp"),
    (ZERO, "--shares", "2,1,1", "--stage", 3),
], ids=["DDP", "FSDP", "DeepSpeed 3"])  # fmt: skip
def test_labels_of_a_file_are_learnt_as_by_one_rank(
    jobs: Jobs, tables: Path, kind: str, options: tuple[object, ...]
) -> None:
    script, *shares = options
    words = ("--labels", tables / f"{kind}.csv", "--data-dir", tables, "--target", kind,
             "--model", "vit_digits", "--img-size", 8, "--batch-size", 32, "--max-steps", 6,
             "--precision", "fp32", "--warmup-epochs", 0, *KINDS[kind])  # fmt: skip
    one = jobs.train(1, DDP, "one", *words, "--shares", "equal")
    run = jobs.train(3, script, "several", *words, *shares)
    assert run.losses == pytest.approx(one.losses, rel=2e-5)
    for own, due in zip(run.epochs, one.epochs, strict=True):
        assert ALONE[kind] <= own.keys()
        assert all(own[name] == pytest.approx(due[name], rel=1e-3) for name in ALONE[kind])
    assert "1 files of the CSV are missing: gone.png" in run.done.output
    assert run.run["config"]["target"] == kind and run.run["result"]["best_step"] > 0


def test_a_set_of_other_classes_is_refused_by_name(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    done = jobs.fork(1, DDP, "--logs", jobs.logs, "--eval-data", f"pets={tmp_path / 'pets'}")
    assert (
        done.code
        and "has the classes cat, which are not classes of the training data" in done.output
    )
    done = jobs.fork(1, DDP, "--logs", jobs.logs, "--eval-data", f"pets={tmp_path / 'none'}")
    assert done.code and "needs one folder per class; No such file" in done.output


@pytest.mark.turns
@pytest.mark.parametrize("count", [3, 5])
def test_the_documented_metric_of_a_task_is_that_of_one_rank(
    jobs: Jobs, tmp_path: Path, count: int
) -> None:
    page = (ROOT / "docs" / "your_model.md").read_text()
    (added,) = re.findall(r"```python\n(gathered = .*?)```", page, re.DOTALL)
    assert added.count("\n") - added.count("\n\n") <= 12
    task = tmp_path / "judged.py"
    task.write_text((ROOT / "examples" / "my_task.py").read_text() + indent(added, "    "))
    words = ("--task", task, "--max-steps", 3, "--batch-size", 64, "--eval-samples", 101,
             "--keep-best", "auroc", "--precision", "fp32", "--shares")  # fmt: skip
    one = jobs.train(1, DDP, "one", *words, "equal", "--micro-batch", 7)
    run = jobs.train(count, DDP, "several", *words, ",".join("50314"[:count]))
    assert 0.4 < one.epochs[-1]["auroc"] < 1
    assert run.epochs[-1]["auroc"] == pytest.approx(one.epochs[-1]["auroc"], rel=1e-5)


def test_a_run_that_is_no_longer_better_ends_and_says_so(jobs: Jobs) -> None:
    words = ("--max-steps", 30, "--eval-every", 2, "--keep-best", "top1", "--keep", 1, "--lr",
             1e-9, "--stop-after", 2, "--save-every", 4)  # fmt: skip
    run = jobs.train(3, DDP, "r", *words, "--shares", "5,0,3")
    assert [each["step"] for each in run.epochs] == [2, 4, 6]
    assert best_of(run) == "step_00000002" and saved(run) == {"step_00000002", "step_00000006"}
    assert run.run["result"]["stopped_early"] and run.run["result"]["best_step"] == 2
    last = "stopped early after step 6: the best top1 is "
    assert run.done.output.strip().splitlines()[-1].startswith(last)
    again = jobs.train(1, DDP, "r", *words, "--resume", "auto", "--shares", "equal")
    assert again.done.output.strip().splitlines()[-1].startswith(last)
    assert len(again.steps()) == 6
    # Another number, and the newest checkpoint alone stays besides the best one.
    further = jobs.train(1, DDP, "r", *words, "--resume", "auto", "--stop-after", 3)
    assert further.epochs[-1]["step"] == 8
    assert best_of(further) == "step_00000002"
    assert saved(further) == {"step_00000002", "step_00000008"}
    best = further.folder / "checkpoints" / "best"
    assert load_checkpoint(checkpoints_at(best)[0])[1]["step"] == 2
    done = run_script("torch_dist/verify.py", further.folder)
    assert done.returncode == 0, done.stdout


def test_a_resumed_run_remembers_the_best(jobs: Jobs) -> None:
    words = ("--eval-every", 2, "--keep-best", "loss", "--keep", 1, "--epochs", 9, "--shares")
    jobs.train(1, DDP, "r", *words, "equal", "--lr", 1e-2, "--warmup-epochs", 0, "--max-steps", 4)
    run = jobs.train(2, DDP, "r", *words, "1,2", "--lr", 10.0, "--max-steps", 8, "--resume")
    losses = {each["step"]: each["loss"] for each in run.epochs}
    assert [*losses] == [2, 4, 6, 8] and max(losses[6], losses[8]) > losses[4]
    assert best_of(run) == f"step_{min(losses, key=losses.__getitem__):08d}"
    assert saved(run) == {best_of(run), "step_00000008"}


def test_by_the_clock_all_ranks_evaluate_at_once(jobs: Jobs) -> None:
    words = ("--eval-every", "1s", "--max-steps", 40, "--batch-size", 160, "--shares", "3,1")
    *before, last = [each["step"] for each in jobs.train(2, DDP, "r", *words).epochs]
    assert before and last == 40
