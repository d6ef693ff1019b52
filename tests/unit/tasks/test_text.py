"""Text: every token is told once, and measured so that numbers can be compared."""

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motley.errors import MotleyError
from motley.tasks.builtin.text import TextTask
from motley.tasks.corpus import KINDS, Codec, Pieces, Windows
from motley.tasks.text_sources import Sources
from motley.tasks.token_cache import TextSpec, TokenizedText, open_text

TEXT = st.text(st.sampled_from("ab é\n€"), min_size=40, max_size=200)


def tokenized(text: str, kind: str, folder: Path, **known: object) -> TokenizedText:
    """A text without a held-out part worth naming."""
    (folder / "a.txt").write_text(text)
    sources = Sources((str(folder / "a.txt"),))
    return open_text(TextSpec(sources, sources, None, Codec(kind), **known))  # type: ignore[arg-type]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(TEXT, st.sampled_from(KINDS), st.integers(1, 12), st.booleans())
def test_every_token_after_the_first_is_told_once(
    tmp_path: Path, text: str, kind: str, length: int, paragraphs: bool
) -> None:
    corpus = tokenized(text, kind, tmp_path, paragraphs=paragraphs)
    tokens = corpus.train.tokens
    assert corpus.codec.decode(tokens.tolist()) == text
    assert tokens.max() < corpus.codec.vocabulary
    assert corpus.count_bytes(tokens) == len(text.encode())
    if paragraphs:
        pieces = Pieces(corpus.train, length)
        told = [list(pieces[index][0].tokens) for index in range(len(pieces))]
        assert [len(piece) - 1 for piece in told] == pieces.sizes.tolist()
        assert all(2 <= len(piece) <= length + 1 for piece in told)
        untold = len(tokens) - sum(len(piece) - 1 for piece in told)
        assert 1 <= untold <= 1 + len(re.findall(r"\n\s*\n", text))
    else:
        windows = Windows(tokens, length)
        told = [list(windows[index][: length + 1]) for index in range(len(windows))]
        assert all(len(piece) == length + 1 for piece in told)
        assert [t for piece in told for t in piece[1:]] == tokens[1:][: length * len(told)].tolist()


def test_bits_a_byte_are_those_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é€ab" * 400)
    for kind, each in (("bytes", 7 / 7), ("characters", 7 / 4)):
        task = TextTask(text=(str(tmp_path / "a.txt"),), tokens=kind, length=8)
        batch = task.collate([task.sample(task.data(True)[0], training=False)])
        assert batch["tokens"].shape == (1, 8)
        told = task.summary({"loss": math.log(2), "bytes": float(batch["bytes"]) / 8})
        assert told["bits_per_byte"] == pytest.approx(8 / float(batch["bytes"]))
        assert float(batch["bytes"]) / 8 == pytest.approx(each, rel=0.3)


def test_a_model_knows_nothing_of_what_comes_later() -> None:
    task = TextTask(length=16, depth=2, width=16, heads=2)
    net = task.model().eval()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = 0
    for fused in (True, False):
        for block in net.blocks:  # type: ignore[union-attr]
            block.fused_attn = fused
        assert torch.allclose(net(tokens)[:, :9], net(changed)[:, :9], atol=1e-6)
        assert not torch.allclose(net(tokens)[:, 9:], net(changed)[:, 9:], atol=1e-3)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("ab" * 30)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 999)
    for name, says in {
        "short.txt": r"too short: the rest has 54 characters, and --length 128",
        "latin.txt": r"not UTF-8 text \(byte 0\).* iconv",
        "none.txt": "none.txt: No such file",
    }.items():
        with pytest.raises(MotleyError, match=says):
            TextTask(text=(str(tmp_path / name),)).data(True)
    with pytest.raises(MotleyError, match="--width 10 is not a multiple of --heads 4"):
        TextTask(width=10).check_options()
