"""Models of transformers are as exact as any, whole and by LoRA; frozen weights are not sent."""

from pathlib import Path

import pytest
from hf_models import config_of, pretrained_folder
from jobs import Jobs, Trained
from project import DDP, ZERO

pytestmark = pytest.mark.mpi

STEPS = ("--max-steps", 11, "--precision", "fp32", "--clip-grad", 1.0, "--warmup-epochs", 0,
         "--task", "text", "--batch-size", 32, "--length", 32, "--eval-samples", 20)  # fmt: skip
IDLE = ("--shares", "5,0,3")
ENGINES = {
    "DDP": (DDP,),
    "FSDP": (DDP, "--strategy", "fsdp", "--micro-batch", 9, "--grad-checkpointing"),
    "ZeRO 1": (ZERO, "--stage", 1),
}
# Tied weights of 10^5 numbers or more, of which ZeRO 3 keeps a part alone on each rank.
WIDE = {"gpt2": {"n_embd": 64, "vocab_size": 1700}, "gpt_neo": {}}
LORA = ("--lora", 4, "--lr", 0.01)


@pytest.fixture(scope="module", params=["gpt2", "gpt_neo"])
def alone(
    request: pytest.FixtureRequest, module_jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, tuple[object, ...], Trained]:
    """A kind of model, the words that say so, and its training by one rank."""
    kind = request.param
    path = config_of(tmp_path_factory.mktemp(kind), kind, **WIDE[kind])
    words = (*STEPS, "--paragraphs", "--hf-config", path)
    return kind, words, module_jobs.train(1, DDP, f"{kind} alone", *words)


@pytest.mark.turns
@pytest.mark.parametrize("name", ENGINES)
def test_a_model_with_tied_weights_is_learnt_as_by_one_rank(
    module_jobs: Jobs, alone: tuple[str, tuple[object, ...], Trained], name: str
) -> None:
    kind, words, one = alone
    run = module_jobs.train(
        3, ENGINES[name][0], f"{kind} {name}", *words, *IDLE, *ENGINES[name][1:]
    )
    assert run.losses == pytest.approx(one.losses, rel=2e-6) and len(run.losses) == 11
    assert run.losses[-1] < 0.99 * run.losses[0]


@pytest.fixture(scope="module")
def adapted(
    module_jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[object, ...], Trained]:
    """A folder with weights and a tokenizer, words that train it by LoRA, and one rank's run."""
    path = tmp_path_factory.mktemp("lora")
    text = path / "a.txt"
    text.write_text("".join(f"{n} and {n * n % 97} make {n + n * n % 97}.\n" for n in range(3000)))
    folder = pretrained_folder(path, text.read_text())
    words = (*STEPS, "--pretrained", folder, "--text", text, *LORA)
    return folder, words, module_jobs.train(1, DDP, "lora alone", *words)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_lora_is_learnt_as_by_one_rank_and_nothing_else(
    module_jobs: Jobs, adapted: tuple[Path, tuple[object, ...], Trained], name: str
) -> None:
    from safetensors.torch import load_file

    folder, words, one = adapted
    options = (*IDLE, *ENGINES[name][1:])
    run = module_jobs.train(3, ENGINES[name][0], f"lora {name}", *words, *options)
    assert run.losses == pytest.approx(one.losses, rel=2e-6)
    assert run.losses[-1] < 0.999 * run.losses[0]
    (path,) = run.folder.glob("checkpoints/step_*11")
    saved, given = load_file(path / "model.safetensors"), load_file(folder / "model.safetensors")
    kept = {name.replace(".base_layer.", "."): value for name, value in saved.items()}
    assert all(kept[name].equal(value) for name, value in given.items())
    optimizer = load_file(path / "optimizer.safetensors")
    assert optimizer and all(".lora_" in name for name in optimizer)
    # Nothing else is sent: two blocks, each with matrices of 4 x 32 and 96 x 4 beside one layer.
    assert run.run["model"]["trained"] == (count := 2 * 4 * (32 + 96))
    assert run.run["model"]["gradient_bytes"] == 4 * count < 4 * run.run["model"]["numbers"] / 30
    assert [event["trained"] for event in run.events if event["event"] == "frozen"] == [count]


def chain(jobs: Jobs, name: str, words: tuple[object, ...]) -> Trained:
    """Some steps through each engine, on other ranks each time, from checkpoint to checkpoint."""
    place = words.index("--max-steps") + 1
    legs = (
        (2, DDP, 2, "--shares", "2,1"),
        (3, DDP, 4, *IDLE, "--strategy", "fsdp"),
        (2, ZERO, 6, "--shares", "1,2", "--stage", 3),
        (3, ZERO, 8, *IDLE, "--stage", 1),
        (2, DDP, 10, "--shares", "1,1", "--strategy", "fsdp"),
        (1, DDP, 11),
    )
    for ranks, script, steps, *options in legs:
        some = (*words[:place], steps, *words[place + 1 :])
        run = jobs.train(ranks, script, name, *some, *options, "--resume", "auto")
    return run


@pytest.mark.turns("from engine to engine")
@pytest.mark.parametrize("alone", ["gpt2"], indirect=True)
def test_tied_weights_go_on_elsewhere_through_any_engine(
    jobs: Jobs, alone: tuple[str, tuple[object, ...], Trained]
) -> None:
    kind, words, one = alone
    assert chain(jobs, f"{kind} chain", words).losses == pytest.approx(one.losses, rel=2e-6)


@pytest.mark.turns("from engine to engine")
def test_lora_goes_on_elsewhere_through_any_engine(
    jobs: Jobs, adapted: tuple[Path, tuple[object, ...], Trained]
) -> None:
    _, words, one = adapted
    assert chain(jobs, "lora chain", words).losses == pytest.approx(one.losses, rel=2e-6)


def test_local_steps_average_lora(
    jobs: Jobs, adapted: tuple[Path, tuple[object, ...], Trained]
) -> None:
    _, words, one = adapted
    local = jobs.train(3, DDP, "local", *words, "--shares", "1,1,1", "--wire", "local:2")
    assert local.run["result"]["loss"] < one.losses[0]
