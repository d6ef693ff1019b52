"""The model's options: what is recomputed, and with which attention kernel."""

from collections.abc import Sequence

import pytest
import torch

from motley.errors import MotleyError
from motley.tasks.builtin import get_task
from motley.tasks.builtin.image import ImageTask
from motley.tasks.classifiers import list_blocks
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net, recompute, set_attention
from motley.train.command_line import read_config, training_parser


def classifier(*words: str, precision: str = "fp32") -> TaskModel:
    config = read_config(training_parser(""), words)
    task = get_task(config)
    return TaskModel(task, build_net(task, config), precision, torch.device("cpu"))


def gradient_and_kept(model: TaskModel) -> tuple[torch.Tensor, int]:
    """The gradient of the sum of all losses; and numbers kept for the backward pass."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(model.noise(16)).sum()
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return gradient, kept


@pytest.mark.parametrize(
    ("words", "at_most"),
    [(["--grad-checkpointing"], 0.3), (["--grad-checkpointing", "mlp,blocks.0.attn"], 0.8)],
    ids=["blocks", "by name"],
)
def test_what_is_recomputed_is_not_kept_and_changes_nothing(
    words: Sequence[str], at_most: float
) -> None:
    whole, kept = gradient_and_kept(classifier())
    again, less = gradient_and_kept(classifier(*words))
    assert torch.equal(again, whole)
    assert less < at_most * kept


@pytest.mark.parametrize(("words", "kept"), [((), True), (("--grad-checkpointing",), False)])
def test_no_weight_is_kept_in_16_bits_besides_where_blocks_are_recomputed(
    words: Sequence[str], kept: bool
) -> None:
    model, seen = classifier(*words, precision="bf16"), set[bool]()
    for block in list_blocks(model.net).values():
        block.register_forward_hook(lambda *_: seen.add(torch.is_autocast_cache_enabled()))
    model(model.noise(2)).sum().backward()
    assert seen == {kept}


def test_what_is_named_twice_is_wrapped_once() -> None:
    net = classifier().net
    recompute(net, ["blocks", "blocks.1"], list_blocks(net))
    inner = list_blocks(net)["blocks.1"].forward
    recompute(net, ["blocks.1"], {})
    assert list_blocks(net)["blocks.1"].forward is inner


def test_an_unknown_module_is_answered_with_the_nearest() -> None:
    with pytest.raises(MotleyError, match=r"no such module \(nearest: blocks.0.mlp"):
        classifier("--grad-checkpointing", "block.0.mlp")


def test_attention_kernels_compute_the_same_and_are_refused_where_they_cannot() -> None:
    model = classifier()
    task, data, usual = ImageTask(), model.noise(9), {}
    try:
        for kind in ("auto", "fused", "plain"):
            set_attention(model.net, kind)
            model.try_attention(kind)
            usual[kind] = task.logits(model.compute, data["images"])
        assert torch.allclose(usual["fused"], usual["auto"], atol=1e-5)
        assert torch.allclose(usual["plain"], usual["auto"], atol=1e-5)
        model = classifier()
        set_attention(model.net, "efficient")
        with pytest.raises(MotleyError, match=r"--attention efficient cannot compute .* on cpu"):
            model.try_attention("efficient")
        with pytest.raises(MotleyError, match="no attention layer whose kernel"):
            set_attention(torch.nn.Linear(2, 2), "plain")
    finally:
        set_attention(model.net, "auto")
