"""A model that no rank holds whole, in small: the same numbers on any ranks, by any engine."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs, Trained
from project import DDP, ROOT, ZERO
from safetensors.torch import load_file

from motley.checkpoint.read import load_checkpoint

pytestmark = pytest.mark.mpi

GPT = ("--task", "text", "--depth", 4, "--width", 64, "--length", 48, "--batch-size", 16,
       "--eval-samples", 30, "--warmup-epochs", 0, "--precision", "fp32",
       "--build", "blocks")  # fmt: skip
# Of a rate so small that no number changes.
STILL = ("--max-steps", 1, "--save-every", 1, "--lr", 1e-60)
RUNS = {
    "FSDP, a rank": (1, DDP, "--strategy", "fsdp"),
    "FSDP, as planned": (2, DDP, "--strategy", "fsdp", "--hosts", "all"),
    "FSDP, unequal": (3, DDP, "--strategy", "fsdp", "--shares", "2,0,1"),
    "FSDP, 5": (5, DDP, "--strategy", "fsdp", "--shares", "equal", "--grad-checkpointing",
                "--reshard-after-forward"),
    "DDP": (2, DDP, "--shares", "3,1"),
    "DeepSpeed 3": (2, ZERO, "--stage", 3, "--shares", "3,1"),
}  # fmt: skip


def parameters_of(run: Trained) -> str:
    (path,) = run.folder.glob("checkpoints/step_*")
    tensors, _ = load_checkpoint(path, only=("model",))
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def alone(module_jobs: Jobs) -> Trained:
    """One rank of DDP."""
    return module_jobs.train(1, DDP, "alone", *GPT, *STILL)


@pytest.mark.turns
@pytest.mark.parametrize("name", RUNS)
def test_any_ranks_draw_the_same_numbers(module_jobs: Jobs, alone: Trained, name: str) -> None:
    ranks, script, *options = RUNS[name]
    run = module_jobs.train(ranks, script, name, *GPT, *STILL, *options)
    assert parameters_of(run) == parameters_of(alone)
    assert run.losses == pytest.approx(alone.losses, rel=2e-6)
    assert len(run.run["result"]["memory_peak_mib"]) == ranks
    assert run.steps()[0]["grad_norm"] == pytest.approx(alone.steps()[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ((DDP, "--strategy", "fsdp"), "--opt adamw8bit, or --reshard-after-forward, or "),
        ((ZERO, "--stage", 3), ""),
    ],
    ids=["FSDP", "DeepSpeed 3"],
)
def test_a_model_that_cannot_fit_is_refused_before_anything_is_allocated(
    jobs: Jobs, words: tuple[object, ...], instead: str
) -> None:
    wide = ("--task", "text", "--width", 24576, "--depth", 96, "--heads", 96)
    done = jobs.fork(2, *words, *wide, "--logs", jobs.logs)
    assert done.code != 0 and done.seconds < 60
    assert "the model does not fit in memory: 2 ranks on" in done.output, done.output
    assert f". Take {instead}a smaller model" in done.output
    assert not jobs.logs.exists()


STEPS = (*GPT, "--lr", 1e-3, "--save-every", 3, "--keep", 9)
FSDP = (DDP, "--strategy", "fsdp")


@pytest.fixture(scope="module")
def whole(module_jobs: Jobs) -> Trained:
    """Without a stop, on one rank."""
    return module_jobs.train(1, DDP, "whole", *STEPS, "--max-steps", 9)


@pytest.fixture(scope="module")
def parts(module_jobs: Jobs) -> Trained:
    """Stopped after 6 steps, saved by three ranks, each what it holds."""
    words = (*FSDP, "parts", *STEPS, "--max-steps", 6, "--shares", "2,0,1")
    run = module_jobs.train(3, words[0], "parts", *words[1:3], *words[4:])
    files = {path.name for path in (run.folder / "checkpoints/step_00000006").iterdir()}
    each = {f"part_0000{rank}.{kind}" for rank in range(3) for kind in ("json", "safetensors")}
    assert files == {*each, "manifest.json", "progress.json"}
    return run


def copy_of(run: Trained, folder: Path) -> Path:
    return Path(shutil.copytree(run.folder / "checkpoints", folder / "copy" / "checkpoints")).parent


RESUMED = {
    "FSDP on 2": (2, *FSDP, "--shares", "3,1"), "FSDP on 1": (1, *FSDP),
    "DDP": (1, DDP), "DeepSpeed 3": (2, ZERO, "--stage", 3),
}  # fmt: skip


@pytest.mark.turns
@pytest.mark.parametrize("name", RESUMED)
def test_parts_are_read_by_any_number_of_ranks_and_the_other_engine(
    module_jobs: Jobs, whole: Trained, parts: Trained, name: str
) -> None:
    ranks, script, *options = RESUMED[name]
    place = parts.folder / "checkpoints/step_00000006"
    run = module_jobs.train(ranks, script, f"on {name}", *STEPS, "--max-steps", 9, *options,
                            "--resume", place)  # fmt: skip
    assert len(run.losses) == 3 and run.losses == pytest.approx(whole.losses[6:], rel=5e-6)
    assert parts.losses == pytest.approx(whole.losses[:6], rel=5e-6)


# Tied, frozen and single numbers, buffers; so much decay that it shows what decays.
ODD = ROOT / "tests" / "support" / "odd_gpt.py"
AVERAGED = (*STEPS, "--task", ODD, "--weight-decay", 10, "--model-ema", "--model-ema-decay", 0.8)


@pytest.fixture(scope="module")
def zero(module_jobs: Jobs) -> Trained:
    """Of DeepSpeed, stopped after 6 steps, saved by two ranks, each what it holds."""
    words = ("tests/support/drivers/built.py", "zero", *AVERAGED, "--stage", 3)
    run = module_jobs.train(2, *words, "--max-steps", 6, "--shares", "3,1")
    assert (run.folder / "checkpoints/step_00000006/part_00001.safetensors").exists()
    return run


def test_a_rank_holds_its_part_and_one_block_while_deepspeed_builds(zero: Trained) -> None:
    tensors = load_checkpoint(zero.folder / "checkpoints/step_00000006", only=("model",))[0]
    assert tensors["model.head.weight"].equal(tensors["model.token.weight"])  # one, of two names
    besides = ("head.weight", "angles")  # the same again, and buffers
    sizes = {name: each.nbytes for name, each in tensors.items() if not name.endswith(besides)}
    block = sum(size for name, size in sizes.items() if ".blocks.3." in name)
    padded = 4 * len(sizes)  # a part may be one number longer
    found = re.findall(r"rank (\d) held at most (\d+) bytes of parameters", zero.done.output)
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    for _, most in found:
        assert sum(sizes.values()) / 2 < int(most) <= sum(sizes.values()) / 2 + block / 2 + padded


@pytest.fixture(scope="module")
def average(module_jobs: Jobs) -> Trained:
    """Without a stop, on one rank of DDP."""
    return module_jobs.train(1, DDP, "average", *AVERAGED, "--max-steps", 9)


@pytest.mark.parametrize("reader", [(3, ZERO, "--stage", 3), (1, DDP)], ids=["3", "DDP"])
def test_deepspeed_saves_parts_that_any_ranks_read(
    module_jobs: Jobs, zero: Trained, average: Trained, reader: tuple[Any, ...]
) -> None:
    count, script, *options = reader
    place = zero.folder / "checkpoints/step_00000006"
    run = module_jobs.train(count, script, f"from zero {count}", *options, *AVERAGED,
                            "--max-steps", 9, "--resume", place)  # fmt: skip
    assert [*zero.losses, *run.losses] == pytest.approx(average.losses, rel=5e-6)
    own, other = (
        load_checkpoint(each.folder / "checkpoints/step_00000009")[0] for each in (run, average)
    )
    assert own.keys() == other.keys() and any(name.startswith("ema.") for name in own)
    for name, tensor in own.items():
        assert tensor.numpy() == pytest.approx(other[name].numpy(), abs=2e-4), name
    if script == DDP:  # inference reads the parts too, and knows them again
        words = ("--checkpoint", place, "--use-ema", "--out", module_jobs.logs / "predicted")
        for _ in range(2):
            done = module_jobs.fork(1, "torch_dist/infer_vit.py", *words)
            assert done.code == 0, done.output
        done = module_jobs.fork(1, "torch_dist/infer_vit.py", *words[:2], *words[3:])
        assert (
            done.code == 2
            and "holds predictions of another model or of other data: model" in done.output
        )


@pytest.mark.turns
@pytest.mark.parametrize("what", ["a bit", "a part", "an index"])
def test_a_part_that_is_damaged_is_named_and_the_one_before_is_used(
    jobs: Jobs, whole: Trained, parts: Trained, tmp_path: Path, what: str
) -> None:
    run = copy_of(parts, tmp_path)
    part = run / "checkpoints/step_00000006/part_00001.safetensors"
    if what == "a bit":
        content = bytearray(part.read_bytes())
        content[-1000] ^= 4
        part.write_bytes(content)
    elif what == "a part":
        part.unlink()
    else:
        part = part.with_suffix(".json")
        part.write_text(part.read_text().replace("1", "2", 1))
    checked = subprocess.run(
        [sys.executable, "torch_dist/verify.py", run], cwd=ROOT, text=True, capture_output=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert checked.returncode and f"{part} is damaged" in checked.stdout, checked.stdout
    assert checked.stdout.count("whole, step") == 1
    if what != "a bit":
        return  # it is read by the same
    resumed = jobs.train(
        2, *FSDP[:1], "again", *FSDP[1:], *STEPS, "--max-steps", 9, "--resume", run
    )
    (event,) = [each for each in resumed.events if "not used" in str(each)]
    assert f"{part} is damaged" in str(event)
    assert resumed.losses == pytest.approx(whole.losses[3:], rel=5e-6)


def test_others_read_parts_too(jobs: Jobs, whole: Trained, parts: Trained, tmp_path: Path) -> None:
    own = load_checkpoint(parts.folder / "checkpoints/step_00000006")[0]
    at_once = load_checkpoint(whole.folder / "checkpoints/step_00000006")[0]
    assert own.keys() == at_once.keys()
    for name, tensor in own.items():
        assert tensor.numpy() == pytest.approx(at_once[name].numpy(), abs=2e-4), name
    words = ("torch_dist/export.py", parts.folder, "--to", tmp_path / "model")
    done = jobs.fork(1, *words)
    assert done.code == 0, done.output
    exported = load_file(tmp_path / "model/model.safetensors")
    assert all(tensor.equal(own[f"model.{name}"]) for name, tensor in exported.items())
    begun = jobs.train(1, DDP, "begun", *GPT[:-2], *STILL, "--initial-checkpoint", parts.folder)
    assert begun.losses[0] < 0.99 * whole.losses[0]


NO_ENGINE = """
import sys
from motley.engines.strategies import Engines
from motley.launch.world import run
from motley.plan.wire import EngineTraits
from motley.train.command_line import read_config, training_parser
from motley.train.start import train

def refuse(model, context):
    raise RuntimeError("an engine was built")

config = read_config(training_parser(""), sys.argv[1:])
run(lambda world: train(world, config, Engines(EngineTraits(), refuse)))
"""


def test_a_disk_that_is_too_small_is_said_before_an_engine_is_built(
    jobs: Jobs, whole: Trained, tmp_path: Path
) -> None:
    script = tmp_path / "no_engine.py"
    script.write_text(NO_ENGINE)
    words = (script, *GPT, *STILL, "--shares", 1)
    small = jobs.fork(1, *words, "--logs", "/proc/motley-logs", "--run", "small")
    assert small.code and "an engine was built" not in small.output, small.output
    assert "will take" in small.output and "0 B are free" in small.output
    # Steps that a checkpoint has behind it need no room; those of a damaged one are known too late.
    at_end = ("--resume", whole.folder, "--max-steps", 6)
    large = jobs.fork(1, *words, *at_end, "--logs", "/proc/motley-logs", "--run", "at-end")
    assert large.code and "an engine was built" in large.output, large.output
