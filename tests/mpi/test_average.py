"""The average of the parameters is the same on any ranks and through any engine; checkpoints hold
it."""

import json
from pathlib import Path

import pytest
import torch
from forked import run_script
from jobs import Jobs, Trained
from project import DDP, ZERO
from safetensors.torch import load_file

from motley.checkpoint.read import load_checkpoint
from motley.infer.predictor import open_trained
from motley.tasks.gpt import Gpt, Shape

pytestmark = pytest.mark.mpi

DECAY, LAST = 0.9, 8
PLAIN = ("--max-steps", LAST, "--batch-size", 64, "--precision", "fp32", "--warmup-epochs", 0,
         "--lr", 3e-3, "--clip-grad", 1.0, "--eval-samples", 90)  # fmt: skip
WORDS = (*PLAIN, "--model-ema", "--model-ema-decay", DECAY, "--model-ema-warmup")
RUNS = {
    "DDP": (5, DDP, "--shares", "5,4,3,2,1", "--micro-batch", 8),
    "FSDP": (3, DDP, "--strategy", "fsdp", "--shares", "5,0,3"),
    "DeepSpeed 2": (2, ZERO, "--stage", 2, "--shares", "3,1"),
    "DeepSpeed 3": (3, ZERO, "--stage", 3, "--shares", "5,0,3"),
}


def saved(run: Trained, step: int) -> dict[str, torch.Tensor]:
    return load_checkpoint(run.folder / "checkpoints" / f"step_{step:08d}")[0]


def averaged_scores(run: Trained, step: int) -> dict[str, float]:
    """What the average that is saved says of the samples that the run is evaluated on."""
    trained = open_trained(run.folder / "checkpoints" / f"step_{step:08d}", None, averaged=True)
    net, task = trained.build(), trained.task
    data = task.data(held_out=True)
    some = [data[number * len(data) // 90] for number in range(90)]
    batch = task.collate([task.sample(item, training=False) for item in some])
    with torch.no_grad():
        scores = task.scores(net, batch)
    return {name: float(values.float().mean()) for name, values in scores.items()}


@pytest.fixture(scope="module")
def alone(module_jobs: Jobs) -> Trained:
    """One rank."""
    words = ("--save-every", 1, "--keep", 9, "--shares", "equal")
    return module_jobs.train(1, DDP, "alone", *WORDS, *words)


def test_it_is_what_its_definition_says_and_changes_nothing_else(
    module_jobs: Jobs, alone: Trained
) -> None:
    plain = module_jobs.train(1, DDP, "plain", *PLAIN, "--shares", "equal")
    assert plain.losses == alone.losses
    before = saved(alone, 1)
    for step in range(2, LAST + 1):
        now, decay = saved(alone, step), min(DECAY, 1 - (1 + step) ** (-2 / 3))
        assert now["ema_numbers.updates"] == step
        names = [name for name in now if name.startswith("ema.")]
        assert len(names) > 40
        for name in names:
            expected = before[name].lerp(now[name.replace("ema.", "model.")], 1 - decay)
            torch.testing.assert_close(now[name], expected, rtol=1e-6, atol=1e-8)
        before = now
    result = alone.run["result"]
    scores = averaged_scores(alone, LAST)
    assert result["ema_loss"] == pytest.approx(scores["loss"], rel=1e-5)
    assert result["ema_top1"] == pytest.approx(scores["top1"])
    assert result["ema_loss"] != result["loss"]
    assert f"(averaged: top-1 {result['ema_top1']:.2%}" in alone.done.output


@pytest.mark.turns
@pytest.mark.parametrize("name", RUNS)
def test_it_is_that_of_one_rank(module_jobs: Jobs, alone: Trained, name: str) -> None:
    ranks, script, *options = RUNS[name]
    half = module_jobs.train(ranks, script, name, *WORDS, *options, "--max-steps", 4)
    expected_loss = averaged_scores(alone, 4)["loss"]
    assert half.run["result"]["ema_loss"] == pytest.approx(expected_loss, rel=1e-5)
    # Another engine goes on with it, on other ranks.
    other = (DDP, "--strategy", "fsdp") if script == ZERO else (ZERO, "--stage", 3)
    run = module_jobs.train(2, other[0], name, *WORDS, *other[1:], "--resume", "auto",
                            "--shares", "1,2")  # fmt: skip
    assert run.losses == pytest.approx(alone.losses, rel=2e-6)
    assert run.run["result"]["ema_loss"] == pytest.approx(alone.run["result"]["ema_loss"], rel=1e-5)
    expected, found = saved(alone, LAST), saved(run, LAST)
    assert found["ema_numbers.updates"] == LAST
    for name_, value in expected.items():
        if name_.startswith("ema."):
            if name_.endswith("qkv.bias"):
                # Softmax does not depend on the keys' bias: its gradient is 0 but for rounding, of
                # which AdamW makes steps of full size.
                keys = slice(len(value) // 3, 2 * len(value) // 3)
                found[name_][keys] = value[keys]
            torch.testing.assert_close(found[name_], value, rtol=1e-4, atol=2e-5, msg=name_)


def test_local_steps_average_it_too(module_jobs: Jobs) -> None:
    run = module_jobs.train(
        3, DDP, "local", *WORDS, "--shares", "3,2,1", "--wire", "local:2", "--save-every", 4
    )
    now = saved(run, LAST)
    assert now["ema_numbers.updates"] == LAST
    far = [(now[name] - now[name.replace("ema.", "model.")]).norm() / now[name].norm()
           for name in now if name.startswith("ema.") and now[name].norm()]  # fmt: skip
    assert 0 < max(far) < 1.5
    assert run.run["result"]["ema_loss"] < next(loss for loss in run.losses if loss is not None)


def test_every_name_of_a_tied_weight_gets_it(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Some words, and some more words.\n" * 300)
    words = ("--task", "text", "--text", tmp_path / "a.txt", "--length", 16, "--depth", 1, "--lr",
             0.02, "--tokens", "characters", "--model-ema", "--model-ema-decay", 0.8)  # fmt: skip
    run = jobs.train(1, DDP, "tied", *words, "--max-steps", 6, "--batch-size", 32)
    trained = open_trained(run.folder, None, averaged=True)
    task, data = trained.task, trained.task.data(held_out=True)
    batch = task.collate([task.sample(data[n], training=False) for n in range(len(data))])
    with torch.no_grad():
        loss = float(task.scores(trained.build(), batch)["loss"].mean()) / 16
    assert run.run["result"]["ema_loss"] == pytest.approx(loss, rel=1e-5)
    assert run.run["result"]["loss"] != pytest.approx(loss, rel=1e-2)
    done = run_script("torch_dist/export.py", run.folder, "--to", tmp_path / "out", "--use-ema")
    assert done.returncode == 0, done.stderr
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    names = ("vocabulary", "length", "depth", "width", "heads", "dropout")
    net = Gpt(Shape(*(about[name] for name in names))).eval()
    net.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    tokens = torch.tensor([[about["characters"].index(letter) for letter in "Some words"]])
    with torch.no_grad():
        assert torch.equal(net(tokens), trained.build()(tokens))


def test_a_skipped_step_is_not_in_it(module_jobs: Jobs) -> None:
    words = (*WORDS, "--max-steps", 4, "--precision", "fp16", "--loss-scale", "2^32")
    run = module_jobs.train(2, DDP, "skipped", *words, "--shares", "1,1")
    taken = sum(not step["overflow"] for step in run.steps())
    assert taken < 4
    assert saved(run, 4)["ema_numbers.updates"] == taken
