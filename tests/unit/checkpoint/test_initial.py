"""Weights that a run begins with: of other classes or sizes, of another model, pickled."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from motley.checkpoint.resume import Weights, _has_same_head, fit, read_weights
from motley.errors import MotleyError
from motley.tasks.builtin import CLASS_NAMES
from motley.tasks.builtin.image import ImageTask
from motley.tasks.builtin.text import TextTask
from motley.tasks.classifiers import vit_digits
from motley.tasks.net import freeze
from motley.train.command_line import read_config, training_parser


class Digits(nn.Module):
    """Runs nothing unless it is unpickled."""


def vit(**options: object) -> nn.Module:
    return vit_digits(**options)


def test_the_head_is_made_anew_for_other_classes_and_positions_for_other_sizes() -> None:
    other = vit(num_classes=4, img_size=16)
    net, task = vit(), ImageTask()
    taken, notes = fit(Weights(other.state_dict(), "there"), task, net)
    assert notes == [
        "new random weights for head.bias, head.weight, "
        "because their shape differs from the checkpoint's"
    ]
    assert set(taken) == set(net.state_dict()) - {"head.weight", "head.bias"}
    assert taken["pos_embed"].shape == net.pos_embed.shape != other.pos_embed.shape
    assert torch.equal(taken["blocks.0.mlp.fc1.weight"], other.blocks[0].mlp.fc1.weight)


def test_the_head_is_kept_where_the_classes_have_the_same_names() -> None:
    config, names = read_config(training_parser(""), []), [*"0123456789"]
    for before, same in (
        ({CLASS_NAMES: names, "data_dir": "moved"}, True),
        ({CLASS_NAMES: names[::-1], "data_dir": "data"}, False),
        ({"data_dir": "data"}, True), ({"data_dir": "moved"}, False),  # of earlier versions
    ):  # fmt: skip
        assert _has_same_head(Weights({}, "there", before), ImageTask(), config) == same


def test_a_tied_weight_is_known_by_any_of_its_names() -> None:
    task = TextTask(depth=1, width=16, heads=2)
    net, other = task.model(), task.model()
    for name in ("token.weight", "head.weight"):  # as files have it, under one name
        weights = {key: t for key, t in other.state_dict().items() if key != name}
        taken, notes = fit(Weights(weights, "there"), task, net)
        net.load_state_dict(taken)
        assert torch.equal(net.token.weight, other.token.weight) and not notes
    freeze(net, ["head"], ())
    assert not net.token.weight.requires_grad and net.position.weight.requires_grad
    tied = task.model()
    freeze(tied, ["backbone"], ("head",))
    assert tied.token.weight.requires_grad and not tied.position.weight.requires_grad


def test_weights_of_another_model_say_which_and_how() -> None:
    other = vit(depth=3, embed_dim=48)
    with pytest.raises(MotleyError) as said:
        fit(Weights(other.state_dict(), "there"), ImageTask(), vit())
    assert "12 missing: blocks.3.attn.proj.bias" in str(said.value)
    assert "blocks.0.attn.proj.bias is 48 there and 96 here" in str(said.value)


def test_a_pickle_is_read_only_if_trusted_and_then_of_tensors_alone(tmp_path: Path) -> None:
    weights = {"head.weight": torch.ones(2, 3)}
    nested, code = tmp_path / "old.pth", tmp_path / "code.pth"
    torch.save({"epoch": 3, "state_dict": {f"module.{n}": t for n, t in weights.items()}}, nested)
    torch.save({"model": Digits()}, code)
    with pytest.raises(MotleyError, match="add --trust"):
        read_weights(str(nested), trust=False)
    found = read_weights(str(nested), trust=True)
    assert found.source == nested
    assert torch.equal(found.tensors["head.weight"], weights["head.weight"])
    with pytest.raises(MotleyError, match="objects other than tensors"):
        read_weights(str(code), trust=True)


def test_folders_are_those_of_timm_and_what_is_damaged_is_said(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match="has no checkpoints, and neither"):
        read_weights(f"local-dir:{tmp_path}", trust=False)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(read_weights(f"local-dir:{tmp_path}", trust=False).tensors) == ["a"]
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(MotleyError, match="is damaged"):
        read_weights(str(tmp_path), trust=False)
    with pytest.raises(MotleyError, match="no such run, file or folder"):
        read_weights(str(tmp_path / "gone"), trust=False)


def test_parts_are_frozen_by_path_last_word_or_all_but_the_head() -> None:
    def trained(*names: str) -> set[str]:
        net = vit()
        freeze(net, names, ImageTask().head(net))
        return {name for name, each in net.named_parameters() if each.requires_grad}

    everything = {name for name, _ in vit().named_parameters()}
    assert trained("backbone") == {"head.weight", "head.bias"}
    assert trained("blocks.0") == {n for n in everything if not n.startswith("blocks.0.")}
    assert trained("norm1", "cls_token") == {
        n for n in everything if ".norm1." not in n and n != "cls_token"
    }
    with pytest.raises(MotleyError, match=r"--freeze block: .*nearest: blocks"):
        trained("block")
