"""A trained model, loaded by others."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from forked import run_script
from hf_models import pretrained_folder
from jobs import Jobs, Trained
from PIL import Image
from project import DDP
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from motley.infer.predictor import open_trained

pytestmark = pytest.mark.mpi


def exported(run: Trained, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_script("torch_dist/export.py", run.folder, "--to", folder, *words)


def write(path: Path, *words: object) -> str:
    """Return the text that ``motley generate`` writes."""
    done = run_script("torch_dist/generate.py", path, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


@pytest.mark.parametrize("model", [
    (), ("--model", "test_resnet", "--img-size", 32, "--batch-size", 64),
], ids=["vit_digits", "test_resnet"])  # fmt: skip
def test_timm_and_onnxruntime_say_what_the_model_says(
    jobs: Jobs, tmp_path: Path, model: tuple[object, ...]
) -> None:
    run = jobs.train(2, DDP, "run", "--max-steps", 3, "--classes", "0,3,5", *model)
    onnx = () if model else ("--onnx",)
    done = exported(run, tmp_path / "out", *onnx)
    assert done.returncode == 0, done.stderr
    net = open_trained(run.folder, None).build()
    size = 32 if model else 8
    images = torch.randn(5, 1, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = net(images)
        # In a process that has never heard of Motley's own model.
        torch.save(images, tmp_path / "images.pt")
        code = (
            "import sys, timm, torch; torch.save(timm.create_model(sys.argv[1], pretrained=True)"
            ".eval()(torch.load(sys.argv[2])), sys.argv[3])"
        )
        words = (f"local-dir:{tmp_path / 'out'}", tmp_path / "images.pt", tmp_path / "said.pt")
        subprocess.run([sys.executable, "-c", code, *map(str, words)], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "said.pt"), expected, rtol=1e-5, atol=1e-5)
    if onnx:
        session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
        (said,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        np.testing.assert_allclose(said, expected.numpy(), rtol=1e-4, atol=1e-5)
    again = exported(run, tmp_path / "out")
    assert again.returncode == 1 and "is not empty" in again.stderr


def predict_by_timm_alone(folder: Path, files: list[Path]) -> dict[str, tuple[str, float]]:
    """The name and the probability of each file's class."""
    net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    usual = timm.data.create_transform(**timm.data.resolve_model_data_config(net))
    said = {}
    for path in files:
        with torch.inference_mode():
            best = net(usual(Image.open(path).convert("RGB"))[None]).softmax(1).max(1)
        said[path.name] = net.pretrained_cfg["label_names"][int(best.indices)], float(best.values)
    return said


def test_plain_timm_predicts_of_files_what_inference_does(jobs: Jobs, tmp_path: Path) -> None:
    root = tmp_path / "data"
    dice = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 40)):
        for number, name in enumerate(("10", "2", "Grün")):
            (root / part / name).mkdir(parents=True)
            for index in range(count):
                size = (*dice.integers(30, 90, 2), 3)
                pixels = dice.integers(0, 120 + 60 * number, size, dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{name}-{index}.png")
    words = ("--dataset", "folder", "--data-dir", root, "--model", "test_vit", "--img-size", 48,
             "--batch-size", 12, "--epochs", 2, "--warmup-epochs", 0, "--workers", 0)  # fmt: skip
    run = jobs.train(1, DDP, "run", *words)
    out = tmp_path / "out"
    old = os.umask(0o027)
    try:
        done = exported(run, out)
    finally:
        os.umask(old)
    assert done.returncode == 0, done.stderr
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o640}
    config = json.loads((out / "config.json").read_text())
    assert config["label_names"] == ["10", "2", "Grün"] and not config["pretrained_cfg"].get("tag")
    about = json.loads((out / "motley.json").read_text())
    assert about["class_names"] == ["10", "2", "Grün"] and about["samples"].startswith("36 train")
    said = predict_by_timm_alone(out, sorted((root / "val").rglob("*.png")))
    infer = "torch_dist/infer_vit.py"
    done = jobs.fork(1, infer, "--checkpoint", run.folder, "--precision", "fp32")
    assert done.code == 0, done.output
    with (run.folder / "predictions-val" / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(said) == 120
    for row in rows:
        name = Path(row["image"]).name
        assert row["label_name"] == name.partition("-")[0]
        assert row["predicted_name"] == said[name][0]
        assert float(row["confidence"]) == pytest.approx(said[name][1], abs=2e-4)
    assert len({name for name, _ in said.values()}) > 1
    # A class folder that is renamed so that labels swap is refused; more images are named.
    again = ("--logs", jobs.logs, "--run", "run", "--resume", "auto", "--epochs", 3)
    Image.new("RGB", (40, 40)).save(root / "train" / "2" / "new.png")
    done = jobs.fork(1, DDP, *again)
    assert done.code == 0 and "the samples differ from the checkpoint's: 37 training" in done.output
    for part in ("train", "val"):
        (root / part / "10").rename(root / part / "30")
    for done in (jobs.fork(1, DDP, *again), jobs.fork(1, infer, "--checkpoint", run.folder,
                                                      "--out", tmp_path / "other")):  # fmt: skip
        assert (
            done.code != 0
            and "class 0 is '2' in the data and '10' in the checkpoint" in done.output
        )


@pytest.mark.parametrize("lora", [(), ("--lora", 4, "--lr", 0.1)], ids=["whole", "LoRA"])
def test_transformers_says_what_a_language_model_says(
    jobs: Jobs, tmp_path: Path, lora: tuple[object, ...]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "a.txt").write_text(text := "Some words, and some more words.\n" * 300)
    folder = pretrained_folder(tmp_path, text)
    words = ("--task", "text", "--pretrained", folder, "--text", tmp_path / "a.txt", "--length", 16)
    run = jobs.train(1, DDP, "tuned", *words, "--max-steps", 3, "--batch-size", 8, *lora)
    done = exported(run, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    net = open_trained(run.folder, None).build()
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(text[:50], return_tensors="pt")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    before = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert not any("lora" in name for name in theirs.state_dict())
    with torch.no_grad():
        said, expected = theirs(**tokens).logits, net(tokens["input_ids"])["logits"]
        torch.testing.assert_close(said, expected, rtol=1e-5, atol=1e-5)
        assert (said - before(**tokens).logits).abs().max() > 1e-3, "it has learnt"
        more = theirs.generate(**tokens, max_new_tokens=20, do_sample=False, eos_token_id=None)
    text_of = AutoTokenizer.from_pretrained(tmp_path / "out").decode
    written = text[:50] + text_of(more[0, tokens["input_ids"].shape[1] :])
    for path in (run.folder, tmp_path / "out"):
        assert write(path, "--prompt", text[:50], "--length", 20, "--temperature", 0) == written


def test_peft_loads_what_conversations_have_taught(jobs: Jobs, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chats = [[{"role": "user", "content": f"After {n}?"},
              {"role": "assistant", "content": f"{n + 1} comes."}] for n in range(200)]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    folder = pretrained_folder(tmp_path, str(chats))
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    run = jobs.train(
        3, DDP, "chats", "--task", "text", "--pretrained", folder, "--text",
        tmp_path / "chats.jsonl", "--chat", "--pack", "--length", 64, "--lora", 4, "--lr", 0.1,
        "--max-steps", 6, "--batch-size", 12, "--shares", "5,0,3",
    )  # fmt: skip
    assert run.losses[-1] < 0.99 * run.losses[0]
    done = exported(run, tmp_path / "out")
    assert done.returncode == 0 and "adapter/adapter_model.safetensors" in done.stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = tokenizer.apply_chat_template(chats[7][:1], tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(prompt, return_tensors="pt")
    base, merged = (AutoModelForCausalLM.from_pretrained(path).eval()
                    for path in (folder, tmp_path / "out"))  # fmt: skip
    with torch.no_grad():
        before = base(**tokens).logits.clone()
        trained = open_trained(run.folder, None).build()(tokens["input_ids"])["logits"]
        adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
        for logits in (adapted(**tokens).logits, merged(**tokens).logits):
            torch.testing.assert_close(logits, trained, rtol=1e-5, atol=1e-5)
    assert (trained - before).abs().max() > 1e-2, "it has learnt"


def test_a_model_writes_text_in_the_tokens_of_its_run(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Früh übt sich, wer ein Meister werden will.\n" * 60)
    words = ("--task", "text", "--text", tmp_path / "a.txt", "--length", 16, "--depth", 1,
             "--width", 16, "--max-steps", 2, "--batch-size", 4)  # fmt: skip
    run = jobs.train(1, DDP, "letters", *words, "--tokens", "characters")
    once = write(run.folder, "--prompt", "Früh", "--length", 30)
    assert once == write(run.folder, "--prompt", "Früh", "--length", 30)
    assert once != write(run.folder, "--prompt", "Früh", "--length", 30, "--seed", 1)
    assert once.startswith("Früh") and len(once) == 34
    longer = run_script(
        "torch_dist/generate.py", run.folder, "--prompt", "Früh " * 9, "--length", 3
    )
    assert longer.returncode == 0 and longer.stdout.startswith("Früh " * 9)
    assert "the prompt has 45 tokens, and the model uses only the last 16" in longer.stderr
    assert len(write(run.folder, "--samples", 2, "--length", 5).split("\n---\n")) == 2
    for wrong, says in (
        ((run.folder, "--prompt", "☃"), "that are not in the training text (☃)"),
        ((run.folder, "--prompt", ""), "--prompt is empty"),
        ((run.folder, "--top-p", 2), "--top-p 2 is not a probability"),
        ((tmp_path,), "has no checkpoint"),
    ):
        done = run_script("torch_dist/generate.py", *wrong)
        assert done.returncode != 0 and says in done.stderr.splitlines()[-1]
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")  # the alphabet is that of the text
    longer = run_script("torch_dist/generate.py", run.folder)
    assert longer.returncode == 1 and "a.txt" in longer.stderr


def test_another_tasks_parameters_are_written_by_name(jobs: Jobs, tmp_path: Path) -> None:
    words = ("--task", "examples/my_task.py", "--digits", 2, "--max-steps", 2)
    run = jobs.train(1, DDP, "mine", *words)
    done = exported(run, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    net = open_trained(run.folder, None).build()
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(net.state_dict()[name], value)


def predict(*words: object) -> subprocess.CompletedProcess[str]:
    return run_script("torch_dist/predict.py", *words)


def test_files_are_predicted_by_a_run_and_by_its_export(jobs: Jobs, tmp_path: Path) -> None:
    run = jobs.train(2, DDP, "run", "--max-steps", 12, "--lr", 3e-3, "--warmup-epochs", 0)
    assert exported(run, tmp_path / "out").returncode == 0
    digits, right = load_digits(), 0
    photos = tmp_path / "my photos"
    (photos / "inner").mkdir(parents=True)
    names = []
    for number in range(40):
        name = photos / ("inner" if number % 2 else "") / f"=x,{number}.png"
        Image.fromarray((digits.images[number] * 255 / 16).astype("uint8")).save(name)
        names.append(str(name))
    table = tmp_path / "table.csv"
    done = predict(run.folder, photos, "--top-k", 3, "--out", table)
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(table.open()))
    assert sorted(line["file"] for line in lines) == sorted(names)
    for line in lines:
        right += line["class"] == str(digits.target[int(line["file"].split(",")[-1][:-4])])
        chances = [float(line[f"probability{end}"]) for end in ("", "_2", "_3")]
        assert chances == sorted(chances, reverse=True) and 0 < sum(chances) <= 1.0001
    assert right > 20, "it has learnt something"
    done = predict(tmp_path / "out", photos, "--test-crops", 10, "--format", "jsonl")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 40
    (photos / "bad.png").write_text("no image")
    again = tmp_path / "again.jsonl"
    done = predict(tmp_path / "out", photos, "--top-k", 3, "--out", again, "--batch-size", 7)
    assert done.returncode == 1 and "cannot be read" in done.stderr and "bad.png" in done.stderr
    assert "40 of 41 images" in done.stdout
    records = [json.loads(line) for line in again.open()]
    assert {each["file"]: str(each["classes"][0]["class"]) for each in records} == {
        line["file"]: line["class"] for line in lines
    }
    for words, says in (
        ((tmp_path, photos), "has no checkpoint"), ((run.folder, tmp_path / "x"), "not exist"),
    ):  # fmt: skip
        done = predict(*words)
        assert done.returncode == 1 and says in done.stderr
    (tmp_path / "out" / "model.safetensors").unlink()
    (tmp_path / "out" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    done = predict(tmp_path / "out", photos)
    assert done.returncode == 1 and "it has no model.safetensors" in done.stderr


HOUSES = """
from dataclasses import dataclass, field, replace
import torch
from motley import Task

@dataclass(frozen=True)
class Houses(Task):
    rows: str | None = None  # an option that nobody sets

    def model(self):
        return torch.nn.Linear(1, 1)

    def with_rows(self, rows):
        task = replace(self)
        task.__dict__["held_out"] = rows
        return task

    def data(self, held_out):
        known = [{"size": n / 32, "price": n / 16} for n in range(64)]
        return self.__dict__.get("held_out", known[:8]) if held_out else known

    def sample(self, item, training):
        price = {"price": torch.tensor([item["price"]])} if training else {}
        return {"size": torch.tensor([float(item["size"])]), **price}

    def losses(self, net, batch):
        return (net(batch["size"]) - batch["price"]).square()[:, 0]

    def scores(self, net, batch):
        return {"loss": net(batch["size"])[:, 0]}

    def predict(self, net, batch):
        return {"price": net(batch["size"])[:, 0].tolist()}
"""


def test_rows_of_a_table_are_predicted_too(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "houses.py").write_text(HOUSES)
    run = jobs.train(1, "torch_dist/train.py", "houses", "--task", tmp_path / "houses.py",
                     "--batch-size", 16, "--epochs", 50, "--opt", "sgd", "--lr", 0.2,
                     "--warmup-epochs", 0, "--weight-decay", 0)  # fmt: skip
    table = tmp_path / "rows.csv"
    table.write_text("name;size;price\n'a;1;x\nb;;\nc;0.5;y\n")
    done = predict(run.folder, table)
    assert done.returncode == 1, "a row without a size is left out"
    assert "rows.csv, line 3: sample() raised ValueError: could not convert" in done.stderr
    lines = list(csv.DictReader(done.stdout.splitlines()))
    assert [(line["name"], line["price"]) for line in lines] == [("'a", "x"), ("c", "y")]
    assert [float(line["price_predicted"]) for line in lines] == pytest.approx([2, 1], abs=0.05)
    objects = tmp_path / "rows.jsonl"
    objects.write_text('{"size": 1.5}\n\n{"size": 0, "more": [1]}\n')
    lines = list(csv.DictReader(predict(run.folder, objects).stdout.splitlines()))
    assert [line["more"] for line in lines] == ["", "[1]"], "rows may have other columns"
    done = predict(run.folder, objects, "--format", "jsonl", "--batch-size", 1)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["price"] == pytest.approx(3, abs=0.05) and second["more"] == [1]
    done = predict(run.folder, table, "--out", table)
    assert done.returncode == 1 and "would replace" in done.stderr
    wrong = HOUSES.replace('net(batch["size"])[:, 0].tolist()', 'batch["cost"]')
    (tmp_path / "houses.py").write_text(wrong)
    done = predict(run.folder, objects)
    assert "predict() of the task Houses raised KeyError: 'cost' (" in done.stderr


@pytest.mark.parametrize("kind", ["labels", "value"])
def test_labels_and_values_are_predicted_too(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    lines = ["file,label"]
    for number in range(30):
        Image.new("L", (8, 8), 8 * number).save(photos / f"{number}.png")
        several = "bright|any" if number > 15 else "any"
        lines.append(f"{number}.png,{several if kind == 'labels' else number / 15 - 1}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    run = jobs.train(1, DDP, kind, "--labels", tmp_path / "table.csv", "--data-dir", photos,
                     "--target", kind, "--model", "vit_digits", "--img-size", 8, "--max-steps", 30,
                     "--batch-size", 16, "--warmup-epochs", 0, "--lr", 3e-3)  # fmt: skip
    assert exported(run, tmp_path / "out").returncode == 0
    for model in (run.folder, tmp_path / "out"):
        done = predict(model, photos / "0.png", photos / "29.png", "--format", "jsonl")
        assert done.returncode == 0, done.stderr
        dark, bright = (json.loads(line) for line in done.stdout.splitlines())
        if kind == "labels":
            assert dark["labels"] == ["any"] and bright["labels"] == ["any", "bright"]
        else:
            assert dark["value"] < bright["value"] - 0.5
