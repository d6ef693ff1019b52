"""Packed documents and conversations: each is learnt as alone, and of answers the answers only."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import config_of, pretrained_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.errors import MotleyError
from motley.tasks.builtin.text import TextTask
from motley.tasks.check import check_task
from motley.tasks.corpus import Part, Pieces
from motley.tasks.model import TaskModel
from motley.tasks.writer import Writer

ROWS = [f"Row {number}: {'so ' * (number % 7)}né{number * number % 97}" for number in range(60)]
QUESTIONS = ("user", "assistant", "user", "assistant")
CHATS = [
    [{"role": role, "content": f"{role} says {number + at} né {'so ' * (number % 5)}"}
     for at, role in enumerate(QUESTIONS[: 2 + 2 * (number % 2)])]
    for number in range(40)
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def rows_file(folder: Path, rows: list[Any], field: str) -> tuple[str, ...]:
    (folder / "rows.jsonl").write_text("".join(json.dumps({field: row}) + "\n" for row in rows))
    return (str(folder / "rows.jsonl"),)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 24))
def test_every_token_of_a_document_is_in_one_pack(sizes: list[int], length: int) -> None:
    ends = np.cumsum(sizes, dtype=np.int64)
    part = Part(np.arange(ends[-1], dtype=np.uint16), ends)
    packed, plain = (Pieces(part, length, pack) for pack in (True, False))
    predicted = [
        sorted(token for at in range(len(pieces)) for piece in pieces[at]
               for token in piece.tokens[1:].tolist())
        for pieces in (packed, plain)
    ]  # fmt: skip
    firsts = {0, *ends.tolist()}
    assert predicted[0] == predicted[1] == [n for n in range(ends[-1]) if n not in firsts]
    assert all(size <= length for size in packed.sizes)
    assert len(packed) <= len(plain)
    # No two packs would fit into one.
    smallest = sorted(packed.sizes.tolist())[:2]
    assert len(packed) < 2 or sum(smallest) > length


def alone(task: TextTask, net: Any, index: int) -> torch.Tensor:
    """The summed losses of a sample's documents, each run without the others."""
    sample = task.sample(task.data(False)[index], training=False)
    result = torch.zeros(())
    for number in sample["documents"].unique():
        here = sample["documents"] == number
        piece = {name: sample[name][here] for name in ("tokens", "targets", "documents")}
        result = result + task.losses(net, task.collate([{**piece, "bytes": 0}]))[0]
    return result


@pytest.mark.parametrize("kind", ["ours", "ours, unfused", "gpt2", "gpt_neo", "llama"])
def test_packed_documents_are_learnt_as_each_alone(tmp_path: Path, kind: str) -> None:
    own = {"width": 32, "depth": 2} if "ours" in kind else {
        "hf_config": str(config_of(tmp_path, kind))
    }  # fmt: skip
    task = TextTask(text=rows_file(tmp_path, ROWS, "text"), length=48, pack=True, **own)  # type: ignore[arg-type]
    torch.manual_seed(1)
    net = task.model()
    check_task(TaskModel(task, net, "fp32", torch.device("cpu")))
    if kind == "ours, unfused":
        for block in net.blocks:  # type: ignore[union-attr]
            block.fused_attn = False
    net.eval()
    samples = [task.sample(task.data(False)[at], training=False) for at in range(6)]
    assert any(int(each["documents"].max()) > 0 for each in samples)
    batch = task.collate(samples)
    together = task.losses(net, batch)
    apart = torch.stack([alone(task, net, at) for at in range(6)])
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=1e-6)
    weights = task.weights(batch)
    assert weights is not None and weights.tolist() == [len(each["tokens"]) for each in samples]
    # Without the bounds of documents the losses are others.
    blind = task.losses(net, {**batch, "documents": torch.zeros_like(batch["documents"])})
    assert not torch.allclose(blind, apart, rtol=1e-4)


def test_a_model_that_does_not_separate_documents_is_refused(tmp_path: Path) -> None:
    path = config_of(tmp_path, "mamba", hidden_size=16, num_hidden_layers=1, state_size=4)
    task = TextTask(hf_config=str(path), text=rows_file(tmp_path, ROWS, "text"), length=16)
    task.model()
    with pytest.raises(
        MotleyError, match=r"type mamba cannot keep the documents of a packed sample ap"
    ):
        TextTask(hf_config=str(path), text=task.text, length=16, pack=True).model()


def learnt_text(task: TextTask, sample: Any) -> str:
    """The text of the learnt tokens, with a bar where others are between them."""
    found, last = [], -2
    for at, token in enumerate(sample["targets"].tolist()):
        if token != -100:
            found += [[]] if at != last + 1 else []
            found[-1].append(token)
            last = at
    return "|".join(task.codec.decode(each) for each in found)


def expected_text(chat: list[dict[str, str]], end: str) -> str:
    return "|".join(each["content"] + end for each in chat if each["role"] == "assistant")


@pytest.mark.parametrize("kind", ["bytes", "characters", "tokenizer", "template"])
def test_of_a_conversation_only_the_answers_are_learnt(tmp_path: Path, kind: str) -> None:
    text = rows_file(tmp_path, CHATS, "messages")
    known: dict[str, Any] = {"tokens": kind}
    end = "\0"
    if kind in ("tokenizer", "template"):
        folder = pretrained_folder(tmp_path, " ".join(map(str, CHATS)) + TEMPLATE)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>"}
        if kind == "template":
            config["chat_template"] = TEMPLATE
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        known, end = {"tokenizer": str(folder)}, "<e>"
    task = TextTask(text=text, chat=True, val_text=text, length=512, width=16, depth=1, **known)
    source = task.data(False)
    assert len(source) == len(CHATS)
    samples = [task.sample(source[at], training=False) for at in range(len(source))]
    for chat, sample in zip(CHATS, samples, strict=True):
        assert learnt_text(task, sample) == expected_text(chat, end)
        whole = task.codec.decode(sample["tokens"].tolist())
        assert all(each["content"] in whole for each in chat[:-1])
        learnt = sample["targets"][sample["targets"] != -100]
        assert sample["bytes"] == pytest.approx(len(expected_text(chat, end).encode()), abs=3)
        assert task.weights(task.collate([sample])).tolist() == [len(learnt)]  # type: ignore[union-attr]
    # A prompt is encoded as the start of a conversation is.
    writer = Writer(None, task.codec, 512, chats=True)
    asked = writer.encode(CHATS[0][0]["content"])
    begins = [each["role"] for each in CHATS[0][:2]] == ["user", "assistant"]
    assert begins and samples[0]["tokens"].tolist()[: len(asked)] == asked
    # The loss is that of the learnt tokens, one by one.
    net = task.model().eval()
    logits = net(samples[1]["tokens"][None])[0].log_softmax(-1)
    loss = -sum(logits[at, token] for at, token in enumerate(samples[1]["targets"]) if token >= 0)
    batch = task.collate(samples[:4])
    torch.testing.assert_close(task.losses(net, batch)[1], loss, rtol=1e-5, atol=1e-5)
    packed = TextTask(text=text, chat=True, val_text=text, length=512, pack=True, **known)
    assert len(packed.data(False)) < len(CHATS)
    total = [sum(int((one.sample(one.data(False)[at], False)["targets"] >= 0).sum())
                 for at in range(len(one.data(False)))) for one in (task, packed)]  # fmt: skip
    assert total[0] == total[1]
    assert task.account == f"{len(CHATS)} conversations, and {len(CHATS)} held out"
    count = len(packed.data(False))
    assert packed.account == f"{task.account}, packed into {count} and {count} samples"
    length = 36 if "tokenizer" in known else 60
    short = TextTask(text=text, chat=True, val_text=text, length=length, **known)
    assert "longer than --length" in short.account


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["a"], r"line 1, messages is a str, not a list of messages"),
        ([[]], r"messages is empty, not a list of messages"),
        ([[{"role": "user"}]], r"message 0 has no string as its content; write"),
        ([[{"role": "assistant", "content": None}]], r"message 0 has no string as its content"),
        ([["a"]], r"message 0 has no string as its role and content"),
        ([[{"role": "user", "content": "a"}]], r"no message of the role assistant.*roles are user"),
    ],
)  # fmt: skip
def test_conversations_that_are_none_are_refused(
    tmp_path: Path, rows: list[Any], says: str
) -> None:
    with pytest.raises(MotleyError, match=says):
        TextTask(text=rows_file(tmp_path, rows, "messages"), chat=True).data(False)


def test_chat_without_conversations_or_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MotleyError, match="--chat reads rows that have the field messages, and --text manual is"
    ):
        TextTask(chat=True).data(False)
    text = rows_file(tmp_path, CHATS, "messages")
    with pytest.raises(MotleyError, match=r"no answer begins within --length 4; raise it, or give"):
        TextTask(text=text, chat=True, length=4).data(False)
    folder = pretrained_folder(tmp_path, str(CHATS))
    for template, says in (
        (
            "{{ raise_exception('no such role') }}",
            r"refuses a conversation with the roles .*no such role",
        ),
        ("{{ messages[-1]['content'] }}", r"writes message 1 of a conversation differently"),
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            r"refuses a conversation with the roles",
        ),
    ):
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template})
        )
        with pytest.raises(MotleyError, match=says):
            TextTask(text=text, chat=True, tokenizer=str(folder)).data(False)
